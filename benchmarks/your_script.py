"""An unmodified script of transformers' Trainer under `resilient run` and under torchrun, in one run.

    python benchmarks/your_script.py [--kills 10] [--rounds 2] [--turns 24] [--turn-s 5] [--json FILE]

A rank is killed, and the time to the next optimizer step is measured; launchers take turns, so that a noisy machine is noisy for
both. torchrun has its shortest interval of looking, and its workaround for the store that attempts share. Both go on from the
Trainer's own checkpoints, one every 20 steps.

Tokens per second without faults, as in `steady.py`: both are there all the time, and take turns at being stopped.
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
from launchers import Launcher, Resilient
from steady import BLOCKS, SETTLE_S, Clock

ENTRY = Path(__file__).parent / "scripts/your_script.py"  # not beside checkpoint.py, whose name is that of a package of ranks
SCRIPT = Path(__file__).parents[1] / "examples/transformers_trainer.py"
RANKS = 2
TOKENS = RANKS * 8 * 32  # of a step: ranks, texts of each, words of a text
MEANING = "What an unmodified script of transformers' Trainer gains under `resilient run`, and what that costs, beside torchrun."


class Ours(Launcher):
    """`resilient run` in torchrun's place; what the entry writes is read, as it is of torchrun."""

    def __init__(self, scratch: Path, words: list[str], environ: dict[str, str]) -> None:
        run = scratch / "resilient-run"
        options = ["--procs", str(RANKS), "--run-dir", str(run), "cluster.device=cpu", "logging.progress=none"]
        command = [sys.executable, "-m", "resilient", "run", *options, "resilience.max_restarts_per_hour=100000", *words]
        super().__init__("resilient", command, scratch / "resilient", environ)
        self._campaign = Resilient("resilient", command, run, environ)

    def stop(self) -> None:
        self._campaign.process = self.process
        self._campaign.stop()


def launchers(scratch: Path) -> list[Launcher]:
    """Both, on directories of their own."""
    environ = {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = {}
    for name in ("resilient", "torchrun"):
        (scratch / name).mkdir(parents=True)
        training = ["--steps", "1000000", "--save-steps", "20", "--out", str(scratch / f"{name}-out")]
        words[name] = [str(ENTRY), str(scratch / name), str(SCRIPT), *training]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "100000",
        "--monitor-interval",
        "0.1",
    ]
    theirs = [*torchrun, "--nproc-per-node", str(RANKS), *words["torchrun"]]
    alone = {**environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [Ours(scratch, words["resilient"], environ), Launcher("torchrun", theirs, scratch / "torchrun", alone)]


def kill(launcher: Launcher, chance: random.Random) -> float:
    """Seconds from a kill to the next step."""
    time.sleep(chance.uniform(1.5, 3.0))
    while True:
        ranks, before = launcher.ranks(), launcher.newest()
        began = time.time()
        try:
            os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL)
            break
        except ProcessLookupError:  # it has ended by itself
            time.sleep(0.5)
    return float(launcher.wait(lambda line: line["generation"] > before["generation"] and line["t"] > began)["t"]) - began


def kills(args: argparse.Namespace) -> list[figures.Figure]:
    found: dict[str, list[float]] = {"resilient": [], "torchrun": []}
    chance = random.Random(args.seed)
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="your-script-") as scratch:
            for launcher in launchers(Path(scratch)):
                try:
                    launcher.start()
                    for _ in range(args.kills // args.rounds + (number < args.kills % args.rounds)):
                        found[launcher.name].append(kill(launcher, chance))
                        sys.stdout.write(f"round {number + 1} {launcher.name}: {found[launcher.name][-1]:.2f} s\n")
                        sys.stdout.flush()
                finally:
                    launcher.stop()
    ours, theirs = found["resilient"], found["torchrun"]
    sys.stdout.write("kill -9 of a rank to the next optimizer step, seconds\n")
    for name, seconds in found.items():
        spread = f"median {statistics.median(seconds):6.2f}  worst {max(seconds):6.2f}  best {min(seconds):6.2f}"
        sys.stdout.write(f"  {name:10} {spread}  of {len(seconds)}\n")
    sys.stdout.write(f"  {statistics.median(theirs) / statistics.median(ours):.1f} times as fast\n")
    return [figures.figure("kill", "`kill -9` of a rank to the next optimizer step of a Trainer", "s", ours, "torchrun", theirs)]


def tokens(args: argparse.Namespace) -> list[figures.Figure]:
    if args.turns < BLOCKS:
        raise SystemExit(f"--turns: at least {BLOCKS}, or 0")
    with tempfile.TemporaryDirectory(prefix="your-script-") as scratch, contextlib.ExitStack() as stack:
        clocks = []
        for launcher in reversed(launchers(Path(scratch))):
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
        plain, ours = ([TOKENS * speed for speed in clock.speeds()] for clock in clocks)
    ratios = sorted(b / a for a, b in zip(plain, ours, strict=True))
    sys.stdout.write(f"tokens per second, {RANKS} ranks, {args.turns} turns of {args.turn_s:g} s each\n")
    for name, speeds in (("torchrun", plain), ("resilient", ours)):
        sys.stdout.write(f"  {name:10} {statistics.mean(speeds):9.1f}\n")
    sys.stdout.write(f"  ratio {statistics.mean(ours) / statistics.mean(plain):.4f}; of {BLOCKS} blocks: ")
    sys.stdout.write(" ".join(f"{ratio:.3f}" for ratio in ratios) + "\n")
    what = "training speed of a Trainer while nothing happens"
    return [figures.figure("tokens", what, "tokens/s", ours, "torchrun", plain, paired=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each; 0: speed only")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=24, help="of each; 0: kills only")
    parser.add_argument("--turn-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    args = figures.arguments(parser)
    found = [*(kills(args) if args.kills else []), *(tokens(args) if args.turns else [])]
    figures.save(args.json, MEANING, found)


if __name__ == "__main__":
    main()
