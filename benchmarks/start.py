"""How long a start takes, beside torchrun's of the same config in the same run, and what starting again costs.

    python benchmarks/start.py [--rounds 10] [--json FILE]

- From the command to the first finished step: one node of two ranks, two nodes of one rank on this machine, and
  `torchrun --nproc_per_node 2 -m trainer`, in turns. The data is prepared before.
- What a rank imports, in a fresh interpreter, beside what torchrun imports and then its rank: the smallest share of torchrun's time
  that a launcher can take which has nothing in memory yet.
- Files that a start opens and looks up (strace, where it is installed).
- From `kill -9` of the command, which is started again at once, to the next finished step; and from `kill -9` of the fork server.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import figures
import psutil
from launchers import Resilient, end, make

ROOT = Path(__file__).parents[1]
CONFIG = Path(__file__).with_name("recovery.yaml")
SHORT = ["train.steps=2", "optimizer.warmup_samples=1"]
PATIENCE_S = 180.0
ONE, TWO, TORCHRUN = "one node of two ranks", "two nodes of one rank", "torchrun"
RANK = """
import importlib, torch, torch._dynamo
from trainer.main import PRELOAD
for name in PRELOAD:
    importlib.import_module(name)
"""
LAUNCHER = "import torch.distributed.run"
NODES = {ONE: [], TWO: ["cluster.nodes=2", "cluster.procs_per_node=1"]}


class Starter:
    """Starts the same short run again and again, by each launcher in a run directory of its own with prepared data."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        # One thread a rank, as both launchers would have it; and modules are compiled once, as on a user's machine.
        self._environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._environ.pop("PYTHONDONTWRITEBYTECODE", None)
        for name in (ONE, TWO, TORCHRUN):
            self.first_step(name)

    def _command(self, name: str) -> list[str]:
        keys = [str(CONFIG), f"run_dir={self._run_dir(name)}", *SHORT]
        if name == TORCHRUN:
            return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "trainer", *keys]
        return [sys.executable, "-m", "resilient", "run", *keys, *NODES[name]]

    def _run_dir(self, name: str) -> Path:
        return self._scratch / name.replace(" ", "-")

    def first_step(self, name: str, within: Sequence[str] = ()) -> tuple[float, float]:
        """Seconds from the command to the first finished step, and when that was, in unix seconds; the run then ends by itself.

        Args:
            within: a command that runs the command that follows it.
        """
        run_dir = self._run_dir(name)
        for leftover in ("checkpoints", "metrics.jsonl", "events.jsonl"):
            path = run_dir / leftover
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        began = time.time()
        process = subprocess.Popen(
            [*within, *self._command(name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environ,
            text=True,
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None
            found = None
            if name == TORCHRUN:  # ranks print it; without a supervisor there are no metrics
                printed = []
                for line in process.stdout:
                    printed.append(line)
                    if found is None and " step 1 loss " in line:
                        found = time.time()
            else:
                while found is None and process.poll() is None and time.time() < began + PATIENCE_S:
                    metrics = run_dir / "metrics.jsonl"
                    if metrics.exists() and metrics.stat().st_size:
                        found = time.time()
                    time.sleep(0.002)
                printed = [process.communicate()[0]]
        except BaseException:
            end(process)
            raise
        if process.wait() != 0 or found is None:
            raise RuntimeError(f"{name} did not get on:\n{''.join(printed)}")
        return found - began, found

    def imports(self) -> tuple[float, float]:
        """Seconds of a rank's imports, without garbage collection meanwhile; of torchrun's imports, and a rank's after them."""
        return self._imported(f"import gc; gc.disable()\n{RANK}"), self._imported(LAUNCHER) + self._imported(RANK)

    def _imported(self, code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"{code}\nimport os; os._exit(0)"], check=True, env=self._environ, cwd=ROOT)
        return time.perf_counter() - began

    def files(self, name: str) -> int:
        """System calls with a file's name, in all processes, until the first step is finished."""
        trace = self._scratch / "trace"
        _, found = self.first_step(
            name, ["strace", "-f", "-qq", "-ttt", "-e", "trace=%file", "-e", "signal=none", "-o", str(trace)]
        )
        with trace.open(errors="replace") as lines:
            called = (line.split(maxsplit=2) for line in lines if " resumed>" not in line)
            return sum(float(words[1]) <= found for words in called)


def again(scratch: Path, rounds: int, what: str) -> list[float]:
    """Seconds to the next finished step from the end of the driver (and its start anew), or of the fork server."""
    run, chance, found = make("resilient", CONFIG, scratch / what, 2, None), random.Random(1), []
    assert isinstance(run, Resilient)
    try:
        run.start()
        for _ in range(rounds):
            reached = run.newest()["step"] + chance.randrange(10, 40)
            run.wait(lambda line, reached=reached: line["step"] >= reached)
            victim = run.process
            if what == "fork server":
                victim = next(process for process in run.family() if process.name() == "forkserver")
            assert isinstance(victim, psutil.Process | subprocess.Popen)
            struck, generation = time.time(), run.newest()["generation"]
            victim.kill()
            if what == "driver":
                run.start()
            run.wait(lambda line, generation=generation: line["generation"] > generation)
            found.append(run.first_of(generation + 1) - struck)
            sys.stdout.write(f"  {what} killed: {found[-1]:.2f} s to the next step\n")
            sys.stdout.flush()
    finally:
        run.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of each")
    args = figures.arguments(parser)
    found = []
    with tempfile.TemporaryDirectory(prefix="start-") as directory:
        scratch = Path(directory)
        starter = Starter(scratch)
        times: dict[str, list[float]] = {ONE: [], TWO: [], TORCHRUN: []}
        imports = []
        for _ in range(args.rounds):
            for name, values in times.items():
                values.append(starter.first_step(name)[0])
            imports.append(starter.imports())
            sys.stdout.write("  ".join(f"{name} {values[-1]:.2f} s" for name, values in times.items()))
            sys.stdout.write("  imports {:.2f} s, torchrun's {:.2f} s\n".format(*imports[-1]))
            sys.stdout.flush()
        what = "command → first finished step"
        found.append(
            figures.figure("first_step/torchrun", f"{what}, {ONE}", "s", times[ONE], TORCHRUN, times[TORCHRUN], paired=True)
        )
        rank, both = zip(*imports, strict=True)
        name = "imports of a rank, alone"
        note = "the least share of torchrun's time that a launcher can take which has nothing in memory yet"
        found.append(figures.figure("imports", name, "s", rank, "torchrun's imports, then a rank's", both, paired=True, note=note))
        found.append(figures.figure("two_nodes", f"{what}, {TWO}", "s", times[TWO], ONE, times[ONE], paired=True))
        if shutil.which("strace"):
            ours, theirs = starter.files(ONE), starter.files(TORCHRUN)
            name = "files opened and looked up until the first step"
            found.append(figures.figure("files", name, "calls", [ours], TORCHRUN, [theirs], note="one start of each, by strace"))
        for victim in ("driver", "fork server"):
            name = f"{victim.replace(' ', '_')}_killed"
            then = ", started again at once" if victim == "driver" else ""
            values = again(scratch, args.rounds, victim)
            found.append(figures.figure(name, f"kill -9 of the {victim}{then} → next finished step", "s", values))
    for each in found:
        beside = f", {each.ratio.median:.2f} of {each.peer}" if each.ratio is not None else ""
        sys.stdout.write(
            f"{each.what}: {each.value.median:.2f} {each.unit} ({each.value.low:.2f} to {each.value.high:.2f}){beside}\n"
        )
    figures.save(
        args.json, "How long a user waits for the first step, and for the next one when what runs the ranks has died.", found
    )


if __name__ == "__main__":
    main()
