"""The cases of gpu.py: what is measured, each by one function that runs in a process of its own. The small ones, and the list."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from gpu_campaigns import campaign, chaos, doctor, kills, quickstart
from gpu_report import Figure
from gpu_setting import ROOT, Case, LeftOut, Setting
from gpu_speed import kernels, plain, trained

from trainer.device import meter_of

__all__ = ["BESIDE", "CASES", "LIMITS_S", "LeftOut", "Setting"]

TEST_PROCESSES = "6"


def tests(setting: Setting) -> Iterator[Figure]:
    """Those in tests/gpu, which are skipped without a GPU."""
    beside = ["-n", TEST_PROCESSES] if importlib.util.find_spec("xdist") and not setting.dry else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *beside, "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    counts = {word.rstrip(","): int(number) for number, word in pairwise(last.split()) if number.isdigit()}
    if not any(counts.get(word) for word in ("passed", "failed", "skipped")):
        raise RuntimeError(done.stdout[-1500:] + done.stderr[-500:])
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    for name in ("passed", "failed", "skipped"):
        yield setting.figure(name, "", counts.get(name, 0), ", ".join(failed) if name == "failed" else "")


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


def two_ranks(setting: Setting) -> Iterator[Figure]:
    """Two ranks on one GPU: NCCL refuses that, over gloo they can be tried. MPS has their kernels run side by side."""
    mps = "with MPS" if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") else "without MPS"
    for backend in ("gloo",) if setting.dry else ("nccl", "gloo"):
        store = setting.scratch / f"store-{backend}"
        store.unlink(missing_ok=True)
        command = [sys.executable, "-c", PAIR, backend, str(setting.device), str(store)]
        ranks = [
            subprocess.Popen([*command, str(rank)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in (0, 1)
        ]
        try:
            said = [each.communicate(timeout=40) for each in ranks]
            seconds = [json.loads(out)["seconds"] for out, _ in said if out]
            note = mps if seconds else _reason(said[0][1])
        except subprocess.TimeoutExpired:
            seconds, note = [], "they hang"
        finally:
            for each in ranks:
                each.kill()
                each.wait()
        yield setting.figure(f"{backend} works", "", float(len(seconds) == 2), note)
        if len(seconds) == 2:
            yield setting.figure(f"all-reduce of 16 MiB over {backend}", "s", max(seconds), note)


def _reason(text: str) -> str:
    """Why a rank has ended, of what it has written: the last line that names an error, or has a word for it."""
    lines = text.strip().splitlines() or [""]
    return next((line for line in reversed(lines) if "Duplicate GPU" in line or "Error" in line), lines[-1])[:200]


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

CASES: dict[str, Case] = {
    "matmul": matmul,
    "copies": copies,
    "start": start,
    "plain": plain(compiled=False),
    "eager": trained("eager"),
    "doctor": doctor,
    "two ranks": two_ranks,
    "kernels": kernels,
    "quickstart": quickstart,
    "kills": kills,
    "chaos": chaos,
    "tests": tests,
    "plain compiled": plain(compiled=True),
    **{name: trained(name) for name in ("compiled", "compiled, micro batch 16")},
    "campaign": campaign(compiled=False, standby=True, count=3),
    "campaign without standby": campaign(compiled=False, standby=False, count=2),
    **{name: trained(name) for name in ("16k tokens", "2k tokens", "8k tokens", "4k tokens", "compiled, math attention")},
    "campaign compiled": campaign(compiled=True, standby=True, count=2),
    "flash-attn": trained("flash-attn"),
}
"""By name, in the order in which they are worth most; those of `BESIDE` come early, for `kernels` makes others short."""

BESIDE = (frozenset({"doctor", "two ranks"}), frozenset({"kernels", "quickstart", "kills", "chaos", "tests"}))
"""Cases that measure no speed of the GPU: those of a set run at the same time, where there are cores for it."""

LIMITS_S = {"kills": 150.0, "chaos": 200.0, "tests": 250.0, "campaign": 120.0, "campaign compiled": 110.0}
"""For cases that may take longer than others."""
