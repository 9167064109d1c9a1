"""Launchers to compare: each runs the same trainer on the same config, and can be hurt.

Owns the processes of one launcher with its run directory, and finds its ranks and its steps.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

_HERE = Path(__file__).parent  # last, for benchmarks/checkpoint.py and trainer.py are not the packages of these names
sys.path[:] = [str(_HERE.parent), *(path for path in sys.path if Path(path) != _HERE), str(_HERE)]

from resilient import ledger, storage
from resilient.agent.memory import agent_record, daemon_directory, region_directory
from resilient.heartbeat.region import peek

ENTRY = Path(__file__).with_name("torchrun_entry.py")
NVRX = ["--ft-workload-check-interval", "0.2", "--ft-rank-heartbeat-timeout", "2", "--ft-initial-rank-heartbeat-timeout", "60"]


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The last whole lines of a JSON-lines file, the newest first."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8192))
        for line in reversed(file.read().split(b"\n")[:-1]):
            try:
                yield json.loads(line)
            except ValueError:  # the first one, cut off
                return


def family(process: "subprocess.Popen[Any]") -> list[psutil.Process]:
    """A process and all below it; nothing where it has ended."""
    try:
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(process: "subprocess.Popen[Any]") -> None:
    """Kill a process and all below it."""
    for each in family(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


class Launcher:
    """One launcher with its run directory; `start`, then hurt it as often as wanted, then `stop`."""

    patience_s = 180.0

    def __init__(self, name: str, command: list[str], run_dir: Path, environ: dict[str, str]) -> None:
        self.name, self.run_dir = name, run_dir
        self._command = command
        self.temporary = run_dir.with_name(f"{run_dir.name}-tmp")
        self._environ = {**os.environ, **environ, "TMPDIR": str(self.temporary)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns after the first steps."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        began = time.time()
        with self.run_dir.with_suffix(".log").open("a") as output:
            self.process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environ, start_new_session=True)
        self.wait(lambda line: line["t"] > began)

    def wait(self, wanted: Callable[[dict[str, Any]], bool], watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The first line of metrics that is as wanted."""
        deadline = time.time() + self.patience_s
        while time.time() < deadline:
            found = [line for line in lines(self.run_dir / "metrics.jsonl") if wanted(line)]
            if found:
                return found[-1]
            assert self.process is not None
            if self.process.poll() is not None:
                raise TimeoutError(f"{self.name} has ended with status {self.process.returncode}; see {self.run_dir}.log")
            watch()
            time.sleep(0.002)  # polls: what is timed ends with a line of a file
        raise TimeoutError(f"{self.name}: no step within {self.patience_s:.0f} s; see {self.run_dir}.log")

    def first_of(self, generation: int) -> float:
        """When the first step of this generation, or a later one, was finished, in unix seconds; it is among the last steps."""
        return min(line["t"] for line in lines(self.run_dir / "metrics.jsonl") if line["generation"] >= generation)

    def newest(self) -> dict[str, Any]:
        """The last step."""
        return next(lines(self.run_dir / "metrics.jsonl"))

    def ranks(self) -> dict[int, int]:
        """Process id by rank."""
        found = {}
        for path in (self.run_dir / "pids").glob("*"):
            found[int(path.name)] = int(path.read_text())
        return found

    def family(self) -> list[psutil.Process]:
        """The launcher's process and all below it."""
        assert self.process is not None
        return family(self.process)

    def stop(self) -> None:
        """Kill everything."""
        if self.process is not None:
            end(self.process)


class Resilient(Launcher):
    """Ours: heartbeat regions say what the ranks are doing."""

    def regions(self) -> list[Path]:
        return sorted(region_directory(self.run_dir, 0).glob("g*-rank*"))

    def ranks(self) -> dict[int, int]:
        found = {}
        for path in self.regions():
            try:
                if path.suffix == "" and (pid := peek(path).pid):
                    found[int(path.name.rpartition("rank")[2])] = pid
            except (OSError, ValueError):
                continue
        return found

    def stop(self) -> None:
        """Kill everything, and give the memory back that another job would go on from."""
        super().stop()
        for log in (self.run_dir / "logs").glob("agent*.log"):
            node = int(log.stem.removeprefix("agent"))
            shutil.rmtree(daemon_directory(self.run_dir, node), ignore_errors=True)
            shutil.rmtree(region_directory(self.run_dir, node), ignore_errors=True)
        with contextlib.suppress(OSError):
            for root in map(Path, storage.read(self.run_dir)["tiers"][0]["roots"]):
                shutil.rmtree(root, ignore_errors=True)
                root.parent.rmdir()

    def agents(self) -> dict[int, psutil.Process]:
        """The agents, by node."""
        found = {}
        for path in self.run_dir.glob("logs/agent*.log"):
            node = int(path.stem.removeprefix("agent"))
            told = agent_record(self.run_dir, node)
            with contextlib.suppress(psutil.NoSuchProcess):
                if told is not None:
                    found[node] = psutil.Process(told.pid)
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the ledger tells of one kind of event."""
        return [dict(line) for line in ledger.read(self.run_dir / ledger.EVENTS) if line["event"] == name]

    def drain(self) -> int:
        """Stop as a scheduler would; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=self.patience_s)


def make(name: str, config: Path, run_dir: Path, ranks: int, ft_launcher: str | None, *overrides: str) -> Launcher:
    """A launcher on a run directory of its own. Raises FileNotFoundError if it is not installed."""
    keys = [f"run_dir={run_dir}", *overrides]
    if name == "resilient":
        return Resilient(name, [sys.executable, "-m", "resilient", "run", str(config), *keys], run_dir, {})
    common = ["--max-restarts", "100000", "--monitor-interval", "0.1"]
    # The workaround for the store that attempts share, which else makes a third of the restarts hang.
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # a launcher may be installed elsewhere
    environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    if name == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *common]
    else:
        found = ft_launcher or shutil.which("ft_launcher")
        if found is None:
            raise FileNotFoundError("ft_launcher is not installed (pip install nvidia-resiliency-ext)")
        tried = subprocess.run([found, "--help"], capture_output=True, text=True, check=False)
        if tried.returncode:
            raise FileNotFoundError(f"{found} does not run: {tried.stderr.strip().splitlines()[-1]}")
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nnodes", "1"]
        command = [found, *rendezvous, *common, "--term-timeout", "1", "--workers-stop-timeout", "1", *NVRX]
    command += ["--nproc-per-node", str(ranks), str(ENTRY), str(run_dir), str(config), *keys]
    return Launcher(name, command, run_dir, environ)
