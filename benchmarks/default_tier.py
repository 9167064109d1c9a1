"""What snapshots in RAM cost that nobody has asked for: training speed with `checkpoint.memory_cost` as it is, and with 0.

    python benchmarks/default_tier.py [--config examples/quickstart.yaml] [--turns 60] [--turn-s 5] [--kills 10] [--json FILE]

Both campaigns are there all the time, and take turns of a few seconds at being stopped with all their processes, so that whatever
else the machine does hits both; speeds are of the time that each had. Beside it stands the processor time of all processes of each
campaign for a step, which other programs disturb less. Then the campaign with the tier runs alone and a random rank is killed
(SIGKILL) at random steps: how many steps were computed again. Exit status 1 if it was more than one.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import figures
from launchers import Launcher, Resilient, make
from steady import BLOCKS, Clock

from resilient import ledger

MEANING = "What snapshots in RAM by default cost: training speed with and without them; steps computed again after a kill."
ROOT = Path(__file__).parents[1]
RANKS = 2
SETTLE_S = 5.0
SETTINGS = ("train.steps=100000", "train.eval_interval=0", "logging.tensorboard=false")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "examples/quickstart.yaml")
    parser.add_argument("--turns", type=int, default=60, help="of each; 0: kills only")
    parser.add_argument("--turn-s", type=float, default=5.0)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = figures.arguments(parser)
    found = speeds(args) if args.turns else []
    lost = kills(args) if args.kills else []
    if lost:
        found.append(figures.figure("again", "steps computed again after a kill", "steps", [float(each) for each in lost]))
    figures.save(args.json, MEANING, found)
    return int(max(lost, default=0) > 1)


def speeds(args: argparse.Namespace) -> list[figures.Figure]:
    if args.turns < BLOCKS:
        raise SystemExit(f"--turns: at least {BLOCKS}, or 0")
    with tempfile.TemporaryDirectory(prefix="default-tier-") as scratch, contextlib.ExitStack() as stack:
        clocks, before = [], []
        for name, cost in (("without", "0"), ("with", "0.005")):
            settings = (*SETTINGS, f"checkpoint.memory_cost={cost}")
            run = make("resilient", args.config, Path(scratch) / name, RANKS, None, *settings)
            stack.callback(run.stop)
            run.start()
            time.sleep(SETTLE_S)  # until what a start does beside training is over
            clocks.append(Clock(run))
            before.append((run.newest()["step"], processor_s(run)))
            clocks[-1].freeze()
        for turn in range(args.turns):
            for clock in clocks if turn % 2 else reversed(clocks):
                clock.thaw()
                time.sleep(args.turn_s)  # its turn, while the other one is stopped
                clock.freeze()
        without, with_it = (clock.speeds() for clock in clocks)
        costs = [
            (processor_s(clock.launcher) - spent_s) / (clock.launcher.newest()["step"] - step)
            for clock, (step, spent_s) in zip(clocks, before, strict=True)
        ]
        every = [
            line["every_steps"] for line in ledger.read(clocks[1].launcher.run_dir / ledger.EVENTS) if line["event"] == "cadence"
        ]
    sys.stdout.write(
        f"steps per second, {RANKS} ranks, {args.turns} turns of {args.turn_s:g} s each; snapshots every {every} steps\n"
    )
    for name, blocks, cost_s in zip(("without", "with"), (without, with_it), costs, strict=True):
        sys.stdout.write(f"  {name:8} {statistics.mean(blocks):7.3f} steps/s, {cost_s:.4f} processor seconds a step\n")
    ratios = sorted(b / a for a, b in zip(without, with_it, strict=True))
    sys.stdout.write(f"  ratio {statistics.mean(with_it) / statistics.mean(without):.4f}; of {BLOCKS} blocks: ")
    sys.stdout.write(" ".join(f"{ratio:.3f}" for ratio in ratios) + f"; by processor time {costs[0] / costs[1]:.4f}\n")
    what = "training speed with snapshots in RAM by default"
    return [figures.figure("speed", what, "steps/s", with_it, "without", without, paired=True)]


def processor_s(run: Launcher) -> float:
    """Of all that belongs to a campaign."""
    spent_s = 0.0
    for process in run.family():
        times = process.cpu_times()
        spent_s += times.user + times.system
    return spent_s


def kills(args: argparse.Namespace) -> list[int]:
    """Steps that were computed again after each of them."""
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="default-tier-") as scratch:
        run = make("resilient", args.config, Path(scratch) / "run", RANKS, None, "train.steps=100000")
        assert isinstance(run, Resilient)
        try:
            run.start()
            for _ in range(args.kills):
                # Far enough apart that the budget of restarts lasts, and that the interval was measured.
                wanted = run.newest()["step"] + chance.randint(8, 20)
                run.wait(lambda line, wanted=wanted: line["step"] >= wanted)
                time.sleep(chance.random() * float(run.newest()["step_s"]))  # to a random moment within a step
                generation = run.newest()["generation"]
                os.kill(run.ranks()[chance.randrange(RANKS)], signal.SIGKILL)
                run.wait(lambda line, generation=generation: line["generation"] > generation)
            lost = wait_for_recoveries(run, args.kills)
        finally:
            run.stop()
    sys.stdout.write(f"{args.kills} kills at random moments: steps computed again {lost}\n")
    return lost


def wait_for_recoveries(run: Resilient, count: int) -> list[int]:
    deadline = time.monotonic() + run.patience_s
    while True:
        found = [line["lost_steps"] for line in ledger.read(run.run_dir / ledger.EVENTS) if line["event"] == "recovered"]
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.1)  # between a look at the ledger and the next


if __name__ == "__main__":
    sys.exit(main())
