"""No false alarm: runs at default settings whose steps vary tenfold, on a machine that is busy with something else.

    python benchmarks/calm.py [--minutes 30] [--json FILE]

Two campaigns at once. One is a script whose steps take between one and ten times as long, at random, with evaluations, pauses like
those of checkpoints, and functions that torch.compile has to compile; the other the trainer with validation and checkpoints. Both
cores are kept busy by others in turns. Exit status 1 if anything was taken for a fault.
"""

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import figures
from launchers import Resilient, make

from resilient import ledger

SCRIPT = """
import os, random, time
import torch
import torch.distributed as dist
from resilient import worker

context = worker.init()
dist.init_process_group("gloo")
chance, step, value = random.Random(context.rank), 0, torch.ones(64, 64)
while worker.should_stop() is None:
    began = time.time()
    with worker.phase("step"):
        time.sleep(chance.uniform(0.05, 0.5))  # stands for what a step computes
        dist.all_reduce(value)
        value /= context.world_size
    step += 1
    if step % 97 == 0:
        factor = float(step)  # a constant that makes the function a new one
        torch._dynamo.reset()
        with worker.phase("step"):
            torch.compile(lambda x: torch.sin(x) * factor + x.softmax(-1))(value)
            dist.barrier()
    if step % 40 == 0:
        with worker.phase("eval"):
            time.sleep(chance.uniform(1, 4))  # for a validation
            dist.barrier()
    if step % 25 == 0:
        with worker.phase("snapshot"):
            time.sleep(chance.uniform(0, 2))  # for a snapshot
            dist.barrier()
    if context.rank == 0:
        worker.report({"step": step, "step_s": time.time() - began, "loss": 1.0})
    worker.beat(step)
"""
MOODY = """
name: moody
run_dir: {directory}/moody
entrypoint: {directory}/script.py
cluster: {{procs_per_node: 2, threads_per_proc: 1}}
data: {{path: {directory}/none}}
model: {{vocab_size: 256}}
train: {{steps: 1000000, global_batch_size: 2, micro_batch_size: 1}}
"""
TRAINER = """
name: trainer
run_dir: {directory}/trainer
cluster: {{procs_per_node: 2, threads_per_proc: 1}}
model: {{layers: 4, hidden: 128, heads: 4, seq_len: 128}}
data: {{text: auto, tokenizer: {{vocab_size: 2048}}}}
train: {{steps: 1000000, global_batch_size: 8, micro_batch_size: 4, eval_interval: 100, eval_iters: 20}}
optimizer: {{warmup_samples: 320, decay_samples: 1000000}}
checkpoint: {{every_steps: 20}}
"""


MEANING = "Whether anything is taken for a fault where nothing fails, however unevenly the steps go; 0 faults are right."


def busy(seed: int) -> None:
    """Keep a core busy, and let it go, in turns."""
    chance = random.Random(seed)
    while True:
        until = time.monotonic() + chance.uniform(1, 20)
        while time.monotonic() < until:
            sum(range(10000))
        time.sleep(chance.uniform(0, 10))  # the machine is left alone for a while


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    args = figures.arguments(parser)
    with tempfile.TemporaryDirectory(prefix="calm-") as scratch:
        directory = Path(scratch)
        (directory / "script.py").write_text(SCRIPT)
        runs: list[Resilient] = []
        for name, text in (("moody", MOODY), ("trainer", TRAINER)):
            config = directory / f"{name}.yaml"
            config.write_text(text.format(directory=directory))
            run = make("resilient", config, directory / name, 2, None)
            assert isinstance(run, Resilient)
            runs.append(run)
        others = [multiprocessing.Process(target=busy, args=(seed,), daemon=True) for seed in range(2)]
        try:
            for run in runs:
                run.start()
            for other in others:
                other.start()
            time.sleep(60 * args.minutes)  # what is measured
            counts = {run.run_dir.name: told(run) for run in runs}
            found = [
                figures.figure(name, f"{name}: what was taken for a fault in {args.minutes:g} min, of {steps} steps", "", [faults])
                for name, (faults, steps) in counts.items()
            ]
            figures.save(args.json, MEANING, found)
            return int(any(faults for faults, _ in counts.values()))
        finally:
            for other in others:
                if other.pid is not None:
                    other.kill()
            for run in runs:
                run.stop()


def told(run: Resilient) -> tuple[int, int]:
    """Say what the run has told; how many faults, and of how many steps."""
    events = list(ledger.read(run.run_dir / ledger.EVENTS))
    faults = [line for line in events if line["event"] == "fault"]
    steps = [line["step_s"] for line in ledger.read(run.run_dir / ledger.METRICS)]
    ordered = sorted(steps)
    print(
        f"{run.run_dir.name}: {len(steps)} steps of {ordered[len(steps) // 100]:.2f} to {ordered[-1 - len(steps) // 100]:.2f} s, "
        f"the longest {ordered[-1]:.1f} s; {len(faults)} faults {dict(Counter(line['kind'] for line in faults))}",
        flush=True,
    )
    for line in faults:
        print(f"  step {line['step']}: {line['kind']}: {line['detail']}", flush=True)
    return len(faults), len(steps)


if __name__ == "__main__":
    sys.exit(main())
