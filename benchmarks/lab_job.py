"""A campaign as a job of a lab's Slurm: hosts that can be lost, cut off and drained while it runs.

Owns what is submitted and how it is watched. Needs what `resilient lab` needs: root, iproute2, Slurm and munge.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

_HERE = Path(__file__).parent  # last, for benchmarks/checkpoint.py and trainer.py are not the packages of these names
sys.path[:] = [str(_HERE.parent), *(path for path in sys.path if Path(path) != _HERE), str(_HERE)]

from chaos.lab.lab import Lab
from chaos.lab.shape import LabPaths, Shape, SlurmTimes
from resilient import ledger

PATIENCE_S = 300.0
ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
HOSTS_OWN = ("unshare", "srun", "slurm")  # how the names of processes begin that are not of the campaign

T = TypeVar("T")
Line = dict[str, Any]


def until(what: Callable[[], T], why: str | Callable[[], str], patience_s: float = PATIENCE_S) -> T:
    """What `what` gives once it gives something true. Raises TimeoutError after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while not (found := what()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience_s:.0f} s in vain for {why if isinstance(why, str) else why()}")
        time.sleep(0.1)  # between a look at the job and the next
    return found


@contextlib.contextmanager
def lab_of(hosts: int, times: SlurmTimes) -> Iterator[Lab]:
    """A lab of this process's own; nothing of it is left."""
    lab = Lab(LabPaths(f"bench{os.getpid()}"))
    try:
        lab.up(Shape(hosts, slurm=True, times=times))
        yield lab
    finally:
        lab.down()


class LabJob:
    """One run directory, and jobs that run on it one after the other."""

    def __init__(self, lab: Lab, directory: Path, config: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True)
        self.lab, self.directory, self.run_dir = lab, directory, directory / "run"
        self.config = {**config, "run_dir": str(self.run_dir)}
        self._path = directory / "config.yaml"
        self._path.write_text(yaml.safe_dump(self.config))
        self._job_id = ""

    def submit(self, *, nodes: str = "", options: Sequence[str] = ()) -> None:
        """The next job; returns once a step of it is finished.

        Args:
            nodes: that are asked for; those of the config and its spares, unless it is said.
            options: further words for sbatch.
        """
        script = self.directory / "job.sh"
        code = f"{_HERE.parent}:{_HERE}"
        lines = ["#!/bin/sh", f"export PYTHONPATH={code} OMP_NUM_THREADS=1", f"cd {self.directory}"]
        script.write_text("\n".join([*lines, f"exec {sys.executable} -m resilient run {self._path}"]) + "\n")
        cluster = self.config["cluster"]
        nodes = nodes or str(cluster["nodes"] + cluster.get("spares", 0))
        asked = [f"--nodes={nodes}", "--no-kill", "--exclusive", "--open-mode=append", *options]
        began = time.time()
        self._job_id = self.on("ctl", "sbatch", "--parsable", *asked, f"--output={self.directory / 'output'}", str(script)).strip()
        until(lambda: (self.last() or {"t": 0.0})["t"] > began, lambda: f"a first step\n{self.told()}")

    def alone(self, steps: int) -> None:
        """So many steps on this machine, outside of the lab."""
        environ = {**os.environ, "PYTHONPATH": f"{_HERE.parent}{os.pathsep}{_HERE}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "resilient", "run", str(self._path), "cluster.spares=0", f"train.steps={steps}"]
        with (self.directory / "output").open("a") as output:
            subprocess.run(command, check=True, cwd=self.directory, env=environ, stdout=output, stderr=output)

    def on(self, host: str, *words: str) -> str:
        """What a command prints that runs on a host."""
        return subprocess.run(self.lab.command(words, host=host), check=True, capture_output=True, text=True).stdout

    def scontrol(self, *words: str) -> None:
        """Tell Slurm something."""
        self.on("ctl", "scontrol", *words)

    def end(self) -> None:
        """Stop the job as `scancel` does; returns when it has ended."""
        self.on("ctl", "scancel", "--batch", f"--signal={signal.SIGTERM.name.removeprefix('SIG')}", self._job_id)
        until(lambda: self._state() in ENDED, lambda: f"the end of the job, which is {self._state()}\n{self.told()}")

    def is_queued(self) -> bool:
        """Whether the job waits in the queue."""
        return self._state() == "PENDING"

    def start_now(self) -> None:
        """Have a job that was put back into the queue start at once, and not after the minutes for which Slurm lets it wait."""
        self.scontrol("update", f"jobid={self._job_id}", "starttime=now")

    def _state(self) -> str:
        told = self.lab.controller.ask("scontrol", "--oneliner", "show", "job", self._job_id) or ""
        return dict(word.split("=", 1) for word in told.split() if "=" in word).get("JobState", "")

    # -- what it tells -------------------------------------------------------------------------------------------------

    def events(self, name: str | None = None, since: float = 0.0) -> list[Line]:
        """Lines of the ledger, oldest first. Args: since: unix seconds."""
        found = ledger.read(self.run_dir / ledger.EVENTS)
        return [line for line in found if name in (None, line["event"]) and line["t"] >= since]

    def metrics(self) -> list[Line]:
        """One line for each step that was finished, oldest first."""
        return list(ledger.read(self.run_dir / ledger.METRICS))

    def last(self) -> Line | None:
        """The last step."""
        found = self.metrics()
        return found[-1] if found else None

    def step(self) -> int:
        """The number of the last step; 0 before the first."""
        last = self.last()
        return last["step"] if last is not None else 0

    def members(self) -> list[str]:
        """The hosts of the generation that runs, by node rank."""
        found: list[str] = self.events("generation_started")[-1]["nodes"]
        return found

    def goes_on(self, steps: int) -> None:
        """Returns once so many more steps are finished."""
        wanted = self.step() + steps
        until(lambda: self.step() >= wanted, lambda: f"step {wanted}\n{self.told()}")

    def told(self) -> str:
        """The last words of all logs."""
        logs = [self.directory / "output", *sorted(self.run_dir.glob("logs/*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in logs if path.is_file())

    # -- what its hosts hold -------------------------------------------------------------------------------------------

    def memory(self, host: str) -> Path:
        """The `/dev/shm` of a host, as this process sees it."""
        return Path(f"/proc/{self.lab.host(host).init()}/root/dev/shm")

    def replicated(self, step: int) -> bool:
        """Whether every member holds a copy of what another one has computed, of this step or a later one."""
        return all(
            any(int(path.parent.name[5:]) >= step for path in self.memory(host).glob("*/node*/replica-*/step-????????/part.json"))
            for host in self.members()
        )

    def is_free(self, host: str) -> bool:
        """Whether nothing of the campaign is left on a host: no process, and nothing in its memory."""
        init = self.lab.host(host).init()
        for pid in self.lab.host(host).processes():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
                if pid != init and not name.startswith(HOSTS_OWN):
                    return False
        return not list(self.memory(host).iterdir())
