"""Tokens per second of the trainer, side by side in one run.

    python benchmarks/trainer.py [--part model|attention|products|layouts|replicas ...] [--rounds 3] [--json FILE]

- model: this trainer at world 1, eager and compiled, against a plain PyTorch GPT script of the same size (plain_gpt.py),
  each a process of one thread: speed, the memory of the process, and that of what a step makes beside weights and moments,
  which both have in fp32;
- attention: flash against math, forward and backward, at 512 to 4096 tokens: speed and peak memory;
- products: one product for queries, keys and values, or gate and up, of weights put together in the pass, against one each;
- layouts: each 3D layout at world 4 against dp 4;
- replicas: three replicas, which do not divide the batch, against four, beside what `resilient plan` says of a node lost.

Contestants take turns, round after round, and medians are compared, so that a noisy machine is noisy for all. On a GPU, `model` and
`attention` use it, and MFU is told against the rate of a large matrix product measured in the same run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import figures
import torch
import torch.nn.functional as F
from contestants import (  # which takes this folder off the path, where this file would be the package `trainer`
    COMPILED,
    DEVICE,
    EAGER,
    PLAIN,
    Contestant,
    config_of,
    resident_peak,
    write_tokens,
)
from torch import Tensor

from resilient.throughput import passes_of_a_step
from resilient.worker import load_config, settle
from trainer.attention import Core, Kernel
from trainer.shape import GPTShape, flops_per_token, shape_of

MEANING = (
    "How fast the trainer is beside a plain script of the same model, flash beside math attention, one product beside three, "
    "layouts beside plain dp, and three replicas beside what the plan says of them."
)


def matmul_rate() -> float:
    """FLOP/s of a large bf16 matrix product here."""
    size = 8192 if DEVICE.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        best = max(best, 4 * 2 * size**3 / (time.perf_counter() - began))
    return best


def part_model(rounds: int) -> list[figures.Figure]:
    with tempfile.TemporaryDirectory() as place:
        config = config_of(Path(place))
        shape = shape_of(config, int(config.model.vocab_size))
    contestants = {name: Contestant(name) for name in (PLAIN, EAGER, COMPILED)}
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            speeds[name].append(contestant.speed(3))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rate = matmul_rate()
    took = {name: contestant.took() for name, contestant in contestants.items()}
    base = speeds[PLAIN]
    print(f"\nmodel: {shape.parameters:,} parameters, bf16, {torch.get_num_threads()} threads, {DEVICE}")
    for name, found in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=True))
        used = statistics.median(found) * flops_per_token(shape) / rate
        peak, made = took[name]
        memory = f"{peak:5,.0f} MiB" + (f", {made:,.0f} made in a step" if made else "")
        fast = f"{statistics.median(found):9,.0f} tokens/s  {ratio:5.2f}x  {100 * used:4.0f} % of the matmul rate"
        print(f"  {name:24} {fast}  {memory}")
    of = f"of a GPT of {shape.parameters / 1e6:.0f} million parameters, bf16, {DEVICE.type}"
    peer = "a plain script, eager"
    ours = [name for name in contestants if name != PLAIN]
    told = [figures.figure(f"model/{name}", f"{name}, {of}", "tokens/s", speeds[name], peer, base, paired=True) for name in ours]
    for name in ours:
        what = f"memory of the process at its most, {name}, {of}"
        told.append(figures.figure(f"model/{name}/peak", what, "MiB", [took[name][0]], peer, [took[PLAIN][0]]))
    plain_made, our_made = took[PLAIN][1], took[EAGER][1]
    assert plain_made is not None and our_made is not None
    what = f"tensors made in a step at most, eager, {of}"
    return [*told, figures.figure("model/memory", what, "MiB", [our_made], peer, [plain_made])]


def part_attention(rounds: int) -> list[figures.Figure]:
    told: list[figures.Figure] = []
    print("\nattention, forward and backward, batch 1, 8 heads of 64, causal, bf16 (each in a process of its own), by tokens")
    for seq in (512, 1024, 2048, 4096):
        found: dict[str, tuple[float, float]] = {}
        raw: dict[str, list[list[float]]] = {}
        for kernel in (Kernel.SDPA_FLASH, Kernel.MATH):
            lines = []
            for _ in range(rounds):
                command = [sys.executable, __file__, "--attention", kernel.value, str(seq)]
                lines.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            raw[kernel.value] = lines
            found[kernel.value] = (statistics.median(line[0] for line in lines), statistics.median(line[1] for line in lines))
        (flash_s, flash_mib), (math_s, math_mib) = found["sdpa_flash"], found["math"]
        print(
            f"  {seq:5}  flash {1e3 * flash_s:8.1f} ms {flash_mib:7.1f} MiB   math {1e3 * math_s:8.1f} ms {math_mib:7.1f} MiB"
            f"   {math_s / flash_s:5.1f}x faster, {math_mib / max(flash_mib, 0.1):5.1f}x less memory"
        )
        flash, plain = raw["sdpa_flash"], raw["math"]
        what = f"flash attention, forward and backward, {seq} tokens"
        times = [1e3 * line[0] for line in flash], [1e3 * line[0] for line in plain]
        told.append(figures.figure(f"attention/{seq}", what, "ms", times[0], "math", times[1], paired=True))
        # Less than a tenth of a MiB is less than the process's own changes.
        memory = [max(line[1], 0.1) for line in flash], [max(line[1], 0.1) for line in plain]
        told.append(
            figures.figure(f"attention/{seq}/memory", f"{what}: peak memory", "MiB", memory[0], "math", memory[1], paired=True)
        )
    return told


def attention_once(kernel: Kernel, seq: int) -> None:
    shape = GPTShape(64, 1, 512, 8, 8, 64, seq)
    core = Core(shape, kernel)
    inputs = [torch.randn(1, 8, seq, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def once() -> None:
        torch.autograd.backward(core(*inputs).float().sum())

    small = [x[:, :, :16].detach().requires_grad_() for x in inputs]
    torch.autograd.backward(core(*small).float().sum())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what there is
    before = resident_peak()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    once()
    peak = (resident_peak() - before) / 2**20
    if DEVICE.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.synchronize()
    began = time.perf_counter()
    count = 4
    for _ in range(count):
        once()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps([(time.perf_counter() - began) / count, peak]))


def part_products(rounds: int) -> list[figures.Figure]:
    """What it would bring to put weights of the same input together in each pass, so that one product does for two or three."""
    told: list[figures.Figure] = []
    hidden, tokens = (2048, 8192) if DEVICE.type == "cuda" else (512, 2048)
    print(
        f"\nproducts of {tokens} tokens, hidden {hidden}, bf16, forward and backward: weights put together in the pass, and apart"
    )
    for name, rows in {
        "queries, keys, values": [hidden] * 3,
        "grouped queries, keys, values": [hidden, hidden // 4, hidden // 4],
        "gate and up": [8 * hidden // 3 // 64 * 64] * 2,
    }.items():
        weights = [torch.randn(each, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for each in rows]
        x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        found: dict[bool, list[float]] = {True: [], False: []}
        for _, together in product(range(rounds + 1), found):
            found[together].append(_products_ms(x, weights, together=together))
        one, apart = found[True][1:], found[False][1:]  # the first round chooses kernels
        ratio = statistics.median(a / b for a, b in zip(apart, one, strict=True))
        print(f"  {name:30} {statistics.median(one):8.2f} ms  {statistics.median(apart):8.2f} ms apart   {ratio:5.2f}x as fast")
        told.append(figures.figure(f"products/{name}", f"{name} by one product", "ms", one, "apart", apart, paired=True))
    return told


def _products_ms(x: Tensor, weights: list[Tensor], *, together: bool) -> float:
    count = 4
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        if together:
            outputs = F.linear(x, torch.cat(weights)).split([len(each) for each in weights], dim=-1)
        else:
            outputs = tuple(F.linear(x, each) for each in weights)
        torch.autograd.grad(outputs, [x, *weights], [torch.ones_like(each) for each in outputs])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / count


# -- several processes ---------------------------------------------------------------------------------------------------


@contextmanager
def campaign(sections: dict[str, dict[str, object]]) -> Iterator[Path]:
    """A config file of a short training, and its data."""
    import yaml

    with tempfile.TemporaryDirectory() as place:
        write_tokens(Path(place))
        config = config_of(Path(place), **sections).model_dump(mode="json", exclude_defaults=True)
        path = Path(place) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        yield path


def speed_of(command: list[str], path: Path, environ: dict[str, str], skip: int, seq_len: int = 512) -> float:
    """Tokens per second of a training: the median of its steps but the first ones."""
    metrics = path.parent / "run" / "metrics.jsonl"
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environ})
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    gaps = [after["t"] - before["t"] for before, after in zip(lines[skip:-1], lines[skip + 1 :], strict=True)]
    return (lines[-1]["samples"] - lines[-2]["samples"]) * seq_len / statistics.median(gaps)


def resilient(path: Path) -> list[str]:
    return [
        str(Path(sys.executable).with_name("resilient")),
        "run",
        str(path),
        "logging.progress=none",
        "logging.tensorboard=false",
    ]


PRECISION = "auto"  # of campaigns: in bf16 a processor without units for it takes fifteen times as long


def part_layouts(rounds: int) -> list[figures.Figure]:
    layouts = [(1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1), (1, 4, 1)]
    speeds: dict[tuple[int, int, int], list[float]] = {layout: [] for layout in layouts}
    train: dict[str, object] = {"steps": 10, "global_batch_size": 16, "micro_batch_size": 2, "precision": PRECISION}
    model: dict[str, object] = {"layers": 4, "hidden": 256, "seq_len": 256}
    for _ in range(rounds):
        for tp, pp, dp in layouts:
            spread: dict[str, object] = {"tp": tp, "pp": pp}
            cluster: dict[str, object] = {"procs_per_node": 4, "device": "cpu"}
            with campaign({"train": train, "parallel": spread, "cluster": cluster, "model": model}) as path:
                speeds[tp, pp, dp].append(speed_of(resilient(path), path, {}, 3, seq_len=256))
    print(f"\nlayouts at world 4 on {os.cpu_count()} cores: hidden 256, 4 layers, tokens/s of all ranks together")
    for layout, found in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(found, speeds[1, 1, 4], strict=True))
        print("  tp {} pp {} dp {}".format(*layout), f"{statistics.median(found):9,.0f} tokens/s  {ratio:5.2f}x of dp 4")
    base, cores = speeds[1, 1, 4], len(os.sched_getaffinity(0))
    return [
        figures.figure(
            f"layout/tp{tp} pp{pp} dp{dp}",
            f"tp {tp} pp {pp} dp {dp}, four ranks on {cores} cores",
            "tokens/s",
            found,
            "dp 4",
            base,
            paired=True,
        )
        for (tp, pp, dp), found in speeds.items()
        if (tp, pp, dp) != (1, 1, 4)
    ]


def part_replicas(rounds: int) -> list[figures.Figure]:
    """Each replica has a core for itself, so that three are no faster for having more of the machine."""
    found: list[figures.Figure] = []
    print("\nthree of four replicas, one thread each: tokens/s as a share of four's, and the share by the plan")
    for stage, count in product((1, 2), (8, 16)):
        speeds: dict[int, list[float]] = {4: [], 3: []}
        passes: dict[int, float] = {}
        sections: dict[str, dict[str, object]] = {
            "train": {"steps": 15, "global_batch_size": 2 * count, "micro_batch_size": 2, "precision": PRECISION},
            "model": {"layers": 4, "hidden": 256, "seq_len": 256},
            "parallel": {"zero_stage": stage},
        }
        for _, dp in product(range(rounds), speeds):
            with campaign({**sections, "cluster": {"procs_per_node": dp, "threads_per_proc": 1, "device": "cpu"}}) as path:
                speeds[dp].append(speed_of(resilient(path), path, {}, 3, seq_len=256))
                config = load_config(path)
                passes[dp] = passes_of_a_step(config, settle(config, dp))
        by_plan = passes[4] / passes[3]
        shares = [three / four for three, four in zip(speeds[3], speeds[4], strict=True)]
        share = statistics.median(shares)
        print(f"  ZeRO-{stage}, {count:2} micro batches  {share:4.0%}, by the plan {by_plan:4.0%}: {share / by_plan:.2f}x")
        what = f"throughput of 3 of 4 replicas, {count} micro batches, ZeRO-{stage}"
        name, plan = f"replicas/zero{stage}/{count}", [by_plan] * rounds
        found.append(figures.figure(name, what, "of four's", shares, "the plan's estimate", plan, paired=True))
    return found


PARTS = {
    "model": part_model,
    "attention": part_attention,
    "products": part_products,
    "layouts": part_layouts,
    "replicas": part_replicas,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be given several times; all without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attention", nargs=2, help=argparse.SUPPRESS)
    arguments = figures.arguments(parser)
    if arguments.attention:
        attention_once(Kernel(arguments.attention[0]), int(arguments.attention[1]))
        return
    found = [figure for part in arguments.part or PARTS for figure in PARTS[part](arguments.rounds)]
    figures.save(arguments.json, MEANING, found)


if __name__ == "__main__":
    main()
