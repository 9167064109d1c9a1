"""Kill -9 of a worker to the next finished step: resilient beside torchrun, same model, same machine, same run.

    python benchmarks/recovery.py [--kills 10] [--config examples/quickstart.yaml]

Both train the same config from the same checkpoint format. torchrun gets the workaround for its shared store
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1) and a short monitor interval. The two take turns, so that a noisy machine is noisy for both.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from resilient.config import load

ENTRY = Path(__file__).with_name("torchrun_entry.py")
ENDLESS = ["train.steps=1000000", "train.eval_interval=0", "optimizer.decay_samples=1000000"]
PATIENCE_S = 120.0


def last_line(path: Path) -> dict[str, float]:
    """The last whole line of a JSON-lines file; empty if there is none."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = [line for line in file.read().split(b"\n")[:-1] if line]
    return json.loads(lines[-1]) if lines else {}


def wait_for_step(path: Path, after_t: float) -> dict[str, float]:
    """The first line that shows a step finished after this moment."""
    deadline = time.time() + PATIENCE_S
    while time.time() < deadline:
        line = last_line(path)
        if line.get("t", 0.0) > after_t:
            return line
        time.sleep(0.002)
    raise SystemExit(f"no step within {PATIENCE_S:.0f} s; see {path.parent}")


class Contestant:
    """One launcher with its run directory; `start`, then `kill_one` as often as wanted, then `stop`."""

    def __init__(self, name: str, command: list[str], metrics: Path, environ: dict[str, str]) -> None:
        self.name, self._command, self.metrics = name, command, metrics
        self._environ = {**os.environ, **environ}
        self.times: list[float] = []

    def start(self, log: Path) -> None:
        with log.open("a") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environ, start_new_session=True)
        wait_for_step(self.metrics, time.time())

    def _workers(self) -> list[int]:
        """Processes that have the rank's threads: the leaves that hold the most memory."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        heavy = sorted(children, key=lambda child: child.memory_info().rss, reverse=True)
        return [child.pid for child in heavy if not child.children()][:2]

    def kill_one(self, chance: random.Random) -> None:
        time.sleep(chance.uniform(0.5, 3.0))
        victim = chance.choice(self._workers())
        before = time.time()
        os.kill(victim, signal.SIGKILL)
        # A step that was just being reported is not one of the new attempt: those start by loading.
        step = wait_for_step(self.metrics, before + 0.05)
        self.times.append(step["t"] - before)

    def stop(self) -> None:
        for process in [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]:
            process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each launcher")
    parser.add_argument("--config", type=Path, default=Path("examples/quickstart.yaml"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as scratch:
        contestants = [make(name, args.config, Path(scratch) / name) for name in ("resilient", "torchrun")]
        chance = random.Random(args.seed)
        rounds = 2
        for number in range(rounds):
            for contestant in contestants:
                contestant.start(Path(scratch) / f"{contestant.name}.log")
                for _ in range(args.kills // rounds):
                    contestant.kill_one(chance)
                    sys.stdout.write(f"round {number + 1} {contestant.name}: {contestant.times[-1]:.2f} s\n")
                    sys.stdout.flush()
                contestant.stop()
    show(contestants)


def make(name: str, config: Path, run_dir: Path) -> Contestant:
    """A launcher on a run directory of its own."""
    keys = [f"run_dir={run_dir}", *ENDLESS]
    if name == "resilient":
        limits = ["resilience.max_restarts_per_hour=100000", "resilience.give_up_after_same_step=100000"]
        command = [sys.executable, "-m", "resilient", "run", str(config), *keys, *limits]
        return Contestant(name, command, run_dir / "metrics.jsonl", {})
    procs = load(config, keys).cluster.procs_per_node
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(procs)]
    options = ["--max-restarts", "100000", "--monitor-interval", "0.1", str(ENTRY), str(run_dir / "metrics.jsonl")]
    threads = str(max(1, len(os.sched_getaffinity(0)) // int(procs)))
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "lo"}
    return Contestant(name, [*launcher, *options, str(config), *keys], run_dir / "metrics.jsonl", environ)


def show(contestants: list[Contestant]) -> None:
    """Medians and worst cases, and the ratio."""
    sys.stdout.write("kill -9 of a worker to the next finished step, seconds\n")
    for contestant in contestants:
        times = sorted(contestant.times)
        sys.stdout.write(
            f"  {contestant.name:10} median {statistics.median(times):.2f}  worst {times[-1]:.2f}  best {times[0]:.2f}"
            f"  of {len(times)}\n"
        )
    ours, theirs = (statistics.median(contestant.times) for contestant in contestants)
    sys.stdout.write(f"  torchrun / resilient: {theirs / ours:.1f}\n")


if __name__ == "__main__":
    main()
