"""What supervision costs while nothing happens.

    python benchmarks/steady.py [--ranks 8] [--step-ms 65] [--seconds 20] [--turns 60] [--turn-s 5] [--json FILE]

Processor time of agent, snapshot daemon and driver, as a share of a core: with ranks that only sleep, beat and report: it is the
runtime alone that is measured.

Tokens per second of the trainer under `resilient run` against torchrun: both are there all the time, and take turns of a few
seconds at being stopped with all their processes, so that whatever else the machine does hits both. Speeds are of the time that
each had.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import figures
import psutil
from launchers import Launcher, make

SCRIPT = """
import sys, time
from resilient import worker

rank, step = worker.init().rank, 0
while worker.should_stop() is None:
    began = time.time()
    with worker.phase("step"):
        time.sleep({step_s})
    step += 1
    if rank == 0:
        worker.report({{"step": step, "step_s": time.time() - began, "loss": 1.0}})
    worker.beat(step)
"""
CONFIG = """
name: steady
run_dir: {directory}/run
entrypoint: {directory}/script.py
cluster: {{procs_per_node: {ranks}, threads_per_proc: 1}}
data: {{path: {directory}/none}}
model: {{vocab_size: 256}}
train: {{steps: 1000000, global_batch_size: {ranks}, micro_batch_size: 1}}
"""
MEANING = "What supervision costs while nothing happens: processor time of its processes, and training speed beside torchrun's."
SETTLE_S = 5.0
TRAINING = Path(__file__).with_name("recovery.yaml")
TRAINING_RANKS = 2
BLOCKS = 6  # of turns, each with a ratio of its own, for the spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=65.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=60, help="of each; 0: processor time only")
    parser.add_argument("--turn-s", type=float, default=5.0)
    args = figures.arguments(parser)
    found = processor_time(args)
    if args.turns:
        found.append(tokens(args))
    figures.save(args.json, MEANING, found)


def processor_time(args: argparse.Namespace) -> list[figures.Figure]:
    with tempfile.TemporaryDirectory(prefix="steady-") as scratch:
        directory = Path(scratch)
        (directory / "script.py").write_text(SCRIPT.format(step_s=args.step_ms / 1000))
        config = directory / "config.yaml"
        config.write_text(CONFIG.format(directory=directory, ranks=args.ranks))
        run = make("resilient", config, directory / "run", args.ranks, None)
        try:
            run.start()
            time.sleep(SETTLE_S)
            before = spent(run.family())
            began = time.monotonic()
            time.sleep(args.seconds)
            took = time.monotonic() - began
            after = spent(run.family())
        finally:
            run.stop()
    sys.stdout.write(f"share of a core, {args.ranks} ranks with steps of {args.step_ms:g} ms, over {took:.0f} s\n")
    found = []
    for name, seconds in after.items():
        share = 100 * (seconds - before[name]) / took
        sys.stdout.write(f"  {name:8} {share:6.2f} %\n")
        what = f"{name}, of a core, with {args.ranks} ranks and steps of {args.step_ms:g} ms"
        found.append(figures.figure(name, what, "%", [share]))
    return found


class Clock:
    """The time that one launcher had, in turns."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._family = launcher.family()
        self._turns: list[tuple[float, float]] = []
        self._began = 0.0

    def freeze(self) -> None:
        """From the launcher down to the ranks, so that nobody is there to notice."""
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        if self._began:
            self._turns.append((self._began, time.time()))

    def thaw(self) -> None:
        self._began = time.time()
        for process in reversed(self._family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def speeds(self) -> list[float]:
        """Steps per second, block by block."""
        lines = [json.loads(line) for line in (self.launcher.run_dir / "metrics.jsonl").read_text().splitlines()]
        if len({line["generation"] for line in lines}) > 1:
            raise SystemExit(f"{self.launcher.name} has restarted its ranks: nothing was measured")
        ended = [line["t"] for line in lines]
        size = len(self._turns) // BLOCKS
        found = []
        for block in range(BLOCKS):
            turns = self._turns[block * size : (block + 1) * size]
            steps = sum(turns[0][0] < t <= turns[-1][1] for t in ended)
            found.append(steps / sum(end - began for began, end in turns))
        return found


def tokens(args: argparse.Namespace) -> figures.Figure:
    if args.turns < BLOCKS:
        raise SystemExit(f"--turns: at least {BLOCKS}, or 0")
    with tempfile.TemporaryDirectory(prefix="steady-") as scratch, contextlib.ExitStack() as stack:
        config = Path(scratch) / "config.yaml"
        config.write_text(TRAINING.read_text() + "logging: {progress: none, tensorboard: false}\n")
        clocks = []
        for name in ("torchrun", "resilient"):
            launcher = make(name, config, Path(scratch) / name, TRAINING_RANKS, None, "checkpoint.every_steps=100000000")
            stack.callback(launcher.stop)
            launcher.start()
            time.sleep(SETTLE_S)
            clocks.append(Clock(launcher))
            clocks[-1].freeze()
        for turn in range(args.turns):
            for clock in clocks if turn % 2 else reversed(clocks):
                clock.thaw()
                time.sleep(args.turn_s)
                clock.freeze()
        plain, ours = (clock.speeds() for clock in clocks)
        ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    sys.stdout.write(f"tokens per second, {TRAINING_RANKS} ranks, {args.turns} turns of {args.turn_s:g} s each\n")
    for name, speeds in (("torchrun", plain), ("resilient", ours)):
        sys.stdout.write(f"  {name:9} {statistics.mean(speeds):7.2f} steps/s\n")
    sys.stdout.write(f"  ratio {statistics.mean(ours) / statistics.mean(plain):.4f}; of {BLOCKS} blocks: ")
    sys.stdout.write(" ".join(f"{ratio:.3f}" for ratio in sorted(ratios)) + "\n")
    return figures.figure("tokens", "training speed while nothing happens", "steps/s", ours, "torchrun", plain, paired=True)


def spent(family: list[psutil.Process]) -> dict[str, float]:
    """Processor seconds so far, by what a process is."""
    found = dict.fromkeys(("driver", "agent", "snapshot daemon"), 0.0)
    for process in family:
        kind = "agent" if process.name() == "agent" else "snapshot daemon" if "checkpoint.daemon" in process.cmdline() else ""
        if kind or process.pid == family[0].pid:
            times = process.cpu_times()
            found[kind or "driver"] += times.user + times.system
    return found


if __name__ == "__main__":
    main()
