"""The cases of gpu.py: what is measured, each by one function that runs in a process of its own.

On a GPU the model is that of `examples/opengptx-800m.yaml` at world 1; in a dry run it is a tiny one, on the CPU.
"""

import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from gpu import ROOT, Figure
from plain_gpt import Size, plain_script

from resilient.worker import Config, init, load_config
from trainer.device import meter_of
from trainer.shape import flops_per_token, peak_flops, shape_of

EXAMPLE = ROOT / "examples/opengptx-800m.yaml"
TINY = ("layers=2", "hidden=32", "heads=2", "ffn_hidden=64", "seq_len=32", "vocab_size=256")
MICRO, ACCUMULATION = 4, 2  # of a step: 65,536 tokens of the 800M model


class LeftOut(Exception):
    """This case cannot be measured here; why."""


@dataclass(frozen=True)
class Setting:
    """Attributes: known: figures of cases before this one, by `case/name`."""

    dry: bool
    scratch: Path
    known: Mapping[str, float]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    def figure(self, name: str, unit: str, value: float, note: str = "") -> Figure:
        return Figure(name, unit, value, gpu=not self.dry, note=note)

    def overrides(self, name: str) -> list[str]:
        """What makes the example one of world 1, on random tokens."""
        tokens = self.scratch / "random"
        if not Path(f"{tokens}.idx").exists():
            _write_tokens(tokens, 256 if self.dry else 50257)
        return [
            *(f"run_dir={self.scratch / name}", "cluster.procs_per_node=1", f"cluster.device={'cpu' if self.dry else 'cuda'}"),
            *(f"train.global_batch_size={MICRO * ACCUMULATION}", f"train.micro_batch_size={MICRO}"),
            *("train.samples=null", "train.steps=1000000", "train.eval_interval=0", "train.exit_duration_min=null"),
            *("optimizer.decay_samples=1000000", "optimizer.warmup_samples=320"),
            *(f"data.path={tokens}", "data.split=[1,0,0]", "logging.level=error"),
            *([*(f"model.{each}" for each in TINY), "cluster.threads_per_proc=1"] if self.dry else []),
        ]

    def config(self, name: str, *more: str) -> Config:
        os.environ.setdefault("SCRATCH", str(self.scratch))
        os.environ.setdefault("PROJECT", str(self.scratch))
        return load_config(EXAMPLE, [*self.overrides(name), *more])


def _write_tokens(prefix: Path, vocabulary: int) -> None:
    import numpy as np

    from trainer.data.indexed import IndexedWriter

    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        numbers = np.random.default_rng(0)
        for _ in range(64):
            writer.add(numbers.integers(0, vocabulary, 16384).tolist())
        writer.commit({})


def tests(setting: Setting) -> Iterator[Figure]:
    """Those in tests/gpu, which are skipped without a GPU."""
    report = setting.scratch / "tests.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    counts = {word.rstrip(","): int(number) for number, word in _pairs(last.split()) if number.isdigit()}
    if done.returncode not in (0, 5) and not counts.get("failed"):
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-500:])
    for name in ("passed", "failed", "skipped"):
        yield setting.figure(name, "tests", counts.get(name, 0), last if counts.get("failed") else "")


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    return pairwise(words)


def matmul(setting: Setting) -> Iterator[Figure]:
    """The rate of a large matrix product, against which the trainer's is told."""
    size, meter = (256 if setting.dry else 8192), meter_of(setting.device)
    a, b = (torch.randn(size, size, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(8):
        first = meter.mark()
        for _ in range(8):
            a @ b
        last = meter.mark()
        meter.wait(last)
        best = max(best, 8 * 2 * size**3 / meter.seconds(first, last) / 1e12)
    yield setting.figure("bf16", "TFLOP/s", best, f"{size} x {size}, the best of 8")


def _speed(setting: Setting, step: Callable[[], None], config: Config, note: str = "") -> Iterator[Figure]:
    """Of steps of a model of this config."""
    meter, speeds = meter_of(setting.device), []
    for _ in range(2):
        step()  # kernels are chosen and compiled
    meter.forget_peak()
    tokens = config.train.global_batch_size * config.model.seq_len
    for _ in range(3 if setting.dry else 10):
        first = meter.mark()
        step()
        last = meter.mark()
        meter.wait(last)
        speeds.append(tokens / meter.seconds(first, last))
    rate = statistics.median(speeds)
    flops = rate * flops_per_token(shape_of(config, int(config.model.vocab_size))) / 1e12
    yield setting.figure("speed", "tokens/s", rate, note)
    yield setting.figure("memory", "GiB", meter.peak_bytes() / 2**30, "the peak of a step")
    if (base := setting.known.get("matmul/bf16")) is not None:
        yield setting.figure("of the matrix product", "%", 100 * flops / base)
    if not setting.dry and (peak := peak_flops(torch.cuda.get_device_name(), "bf16")) is not None:
        yield setting.figure("MFU", "%", 100e12 * flops / peak, "of the maker's peak; the goal is 55")


def trained(*more: str) -> Callable[[Setting], Iterator[Figure]]:
    """This trainer, data and reports included."""

    def case(setting: Setting) -> Iterator[Figure]:
        from trainer.loop import Trainer

        if "model.attention=flash_attn" in more and (setting.dry or importlib.util.find_spec("flash_attn") is None):
            raise LeftOut("the flash-attn package runs on a GPU alone" if setting.dry else "flash-attn is not installed")
        if setting.dry and "train.compile=true" in more:
            whole = torch.nn.Module.compile
            torch.nn.Module.compile = lambda module, **more: whole(module, backend="eager", **more)  # type: ignore[method-assign,assignment]
        config = setting.config("speed", *more)
        yield from _speed(setting, Trainer(config, init())._step, config)

    return case


def plain(setting: Setting) -> Iterator[Figure]:
    """What a person writes in an hour, eager, SDPA."""
    config = setting.config("speed")
    model = config.model
    size = Size(model.layers, model.hidden, model.heads, model.seq_len, int(model.vocab_size), MICRO, ACCUMULATION)
    yield from _speed(setting, plain_script(size, setting.device), config, "without biases and tied embeddings")


def copies(setting: Setting) -> Iterator[Figure]:
    """From the GPU to page-locked memory and back: what no snapshot can be faster than."""
    size, meter = (1 << 22 if setting.dry else 4 << 30), meter_of(setting.device)
    far = torch.ones(size, dtype=torch.uint8, device=setting.device)
    near = torch.empty(size, dtype=torch.uint8, pin_memory=not setting.dry)
    for name, target, source in (("to the host", near, far), ("to the GPU", far, near)):
        rates = []
        for _ in range(5):
            first = meter.mark()
            target.copy_(source, non_blocking=True)
            last = meter.mark()
            meter.wait(last)
            rates.append(size / meter.seconds(first, last) / 1e9)
        yield setting.figure(name, "GB/s", max(rates), "the best of 5")


def start(setting: Setting) -> Iterator[Figure]:
    """What a rank does once on its way to its first step, by itself: of a restart, what standbys on GPUs would spare."""
    began = time.perf_counter()
    numbers = torch.ones(1 << 10, device=setting.device)
    float(numbers.sum())
    yield setting.figure("context", "s", time.perf_counter() - began, "CUDA's, and the first kernel; torch was imported")
    began = time.perf_counter()
    backend = "gloo" if setting.dry else "cpu:gloo,cuda:nccl"
    bound = None if setting.dry else setting.device
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)  # type: ignore[attr-defined]
    dist.all_reduce(numbers)
    float(numbers.sum())
    yield setting.figure("process group", "s", time.perf_counter() - began, "of one rank, with its first collective")
    began = time.perf_counter()
    wide = torch.randn(1 << 9, 1 << 9, device=setting.device, dtype=torch.bfloat16)
    float((wide @ wide).sum())
    yield setting.figure("cuBLAS", "s", time.perf_counter() - began)


def campaign(setting: Setting) -> Iterator[Figure]:
    """A whole run: what training waits for snapshots in RAM, and what a killed rank costs, by phases."""
    import recovery
    from launchers import Resilient, make

    run_dir = setting.scratch / "campaign"
    durable = f"{{name: d, path: {run_dir}/checkpoints, every_steps: 1000000}}"
    tiers = f"checkpoint.tiers=[{{name: ram, path: /dev/shm, every_steps: 5}}, {durable}]"
    lasting = ("resilience.max_restarts_per_hour=100000", "resilience.give_up_after_same_step=100000", "resilience.backoff_s=0.1")
    overrides = [each for each in setting.overrides("campaign") if not each.startswith("run_dir=")]
    os.environ.update(SCRATCH=str(setting.scratch), PROJECT=str(setting.scratch), PYTHONPATH=str(ROOT))
    launcher = make("resilient", EXAMPLE, run_dir, 1, None, *overrides, *lasting, tiers)
    assert isinstance(launcher, Resilient)
    _end_leftovers(launcher)
    times, chance = recovery.Times(), random.Random(0)
    try:
        launcher.start()
        for _ in range(1 if setting.dry else 5):
            launcher.wait(lambda _: any(event["tier"] == "ram" for event in launcher.events("snapshot")))
            recovery.hurt(launcher, "kill", chance, times)
        snapshots = [event for event in launcher.events("snapshot") if event["tier"] == "ram"]
    finally:
        launcher.stop()
    stalls = [event["stall_s"] for event in snapshots]
    size = statistics.median(event["bytes"] for event in snapshots)
    yield setting.figure("snapshot", "GB", size / 1e9)
    yield setting.figure("stall", "s", statistics.median(stalls), f"of {len(stalls)} snapshots")
    bandwidth = size / 1e9 / max(statistics.median(stalls), 1e-9)
    yield setting.figure("bandwidth", "GB/s", bandwidth)
    if (base := setting.known.get("copies/to the host")) is not None:
        yield setting.figure("of a page-locked copy", "%", 100 * bandwidth / base)
    kills = times.seconds["kill"]
    yield setting.figure("kill to next step", "s", statistics.median(kills), f"of {len(kills)} kills")
    yield setting.figure("a step", "s", statistics.median(times.step_s))
    for phase, seconds in times.phases.items():
        if seconds:
            yield setting.figure(f"kill: {phase}", "s", statistics.median(seconds), "without standbys on GPUs")


def _end_leftovers(launcher: Any) -> None:
    """Of a benchmark that was cut off: a campaign that still runs, its memory and its run directory."""
    for process in psutil.process_iter(["cmdline"]):
        if f"run_dir={launcher.run_dir}" in (process.info["cmdline"] or ()):
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs([process], timeout=30)
    if launcher.run_dir.exists():
        launcher.process = subprocess.Popen(["true"])
        launcher.stop()
        shutil.rmtree(launcher.run_dir)


def two_ranks(setting: Setting) -> Iterator[Figure]:
    """Two ranks on one GPU: NCCL refuses that, over gloo they can be tried. MPS has their kernels run side by side."""
    mps = "with MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "without MPS"
    for backend in ("gloo",) if setting.dry else ("nccl", "gloo"):
        store = setting.scratch / f"store-{backend}"
        store.unlink(missing_ok=True)
        command = [sys.executable, "-c", PAIR, backend, str(setting.device), str(store)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks = [subprocess.Popen([*command, str(rank)], text=True, **pipes) for rank in (0, 1)]
        try:
            said = [each.communicate(timeout=90) for each in ranks]
            seconds = [json.loads(out)["seconds"] for out, _ in said if out]
            note = mps if seconds else said[0][1].strip().splitlines()[-1][:200]
        except subprocess.TimeoutExpired:
            seconds, note = [], "they hang"
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        yield setting.figure(f"{backend} works", "", float(len(seconds) == 2), note)
        if len(seconds) == 2:
            yield setting.figure(f"all-reduce of 16 MiB over {backend}", "s", max(seconds), note)


PAIR = """
import json, sys, time
import torch, torch.distributed as dist
backend, device, store, rank = sys.argv[1:]
if device != "cpu":
    torch.cuda.set_device(device)
dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
numbers = torch.ones(4 << 20, device=device)
dist.all_reduce(numbers)
began = time.perf_counter()
dist.all_reduce(numbers)
assert float(numbers[0]) == 4.0
print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
dist.barrier()
"""

CASES: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "matmul": matmul,
    "copies": copies,
    "start": start,
    "plain": plain,
    "eager": trained("train.compile=false", "model.attention=sdpa_flash"),
    "compiled": trained("train.compile=true", "model.attention=sdpa_flash"),
    "flash-attn": trained("train.compile=true", "model.attention=flash_attn"),
    "two ranks": two_ranks,
    "tests": tests,
    "campaign": campaign,
}
"""By name, in the order in which they are worth most."""
