"""Hosts with links of their own and a real Slurm, and campaigns that run on them as jobs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from campaigns import MODEL, PATIENCE_S, ROOT, STEPS, Campaign, finished, wait_for

from chaos.lab.host import namespaces
from chaos.lab.lab import Lab
from chaos.lab.shape import PREFIX, LabPaths, Shape, SlurmTimes
from resilient.slurm.hosts import expand

TOYS = Path(__file__).parents[1] / "integration"
CODE = f"{TOYS}:{ROOT}"  # where Python finds what is tested, and entry points of tests
HOSTS = {0: "n1", 1: "n2", 2: "n3"}  # by node
OURS = "test"  # how the names of these labs start
TIMES = SlurmTimes(slurmd_timeout_s=30, kill_wait_s=5, grace_s=2)
GLOBAL_BATCH = 12
TRAIN = {"precision": "bf16", "eval_interval": 1000}
RUNNING = {"PENDING", "RUNNING", "SIGNALING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED"}


def _remove_labs_of_the_dead() -> None:
    for place in {LabPaths(name.split("-")[1]) for name in namespaces() if name.startswith(f"{PREFIX}-{OURS}")}:
        if not Path(f"/proc/{place.name.removeprefix(OURS)}").exists():
            Lab(place).down()


@pytest.fixture(scope="session")
def own_lab() -> Iterator[Lab]:
    """A lab that is not up, whose name is this process's own; nothing of it is left afterwards."""
    _remove_labs_of_the_dead()
    lab = Lab(LabPaths(f"{OURS}{os.getpid()}"))
    yield lab
    lab.down()


@pytest.fixture
def bare(own_lab: Lab) -> Iterator[Lab]:
    """Two fresh hosts without Slurm."""
    own_lab.up(Shape(hosts=2))
    yield own_lab
    own_lab.down()


@pytest.fixture
def impatient(own_lab: Lab) -> Iterator[Lab]:
    """Four fresh hosts with a Slurm that notices soon when one is gone."""
    own_lab.up(Shape(hosts=4, slurm=True, times=replace(TIMES, slurmd_timeout_s=15)))
    yield own_lab
    own_lab.down()


@pytest.fixture
def lab(own_lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Four fresh hosts with Slurm, with the times of the parameter if a test has one."""
    own_lab.up(Shape(hosts=4, slurm=True, times=getattr(request, "param", TIMES)))
    yield own_lab
    own_lab.down()


@pytest.fixture
def patient(own_lab: Lab) -> Iterator[Lab]:
    """Four fresh hosts with a Slurm that gives a job as much time to end as a site's does."""
    own_lab.up(Shape(hosts=4, slurm=True, times=SlurmTimes(slurmd_timeout_s=10)))
    yield own_lab
    own_lab.down()


def on(lab: Lab, host: str, *words: str) -> str:
    """What a command prints that runs on a host."""
    return subprocess.run(lab.command(words, host=host), check=True, capture_output=True, text=True).stdout


def begin_again(lab: Lab, job_id: str) -> None:
    """Have a job begin that was put back into the queue, which Slurm would let wait for minutes.

    Not within the second in which it ended: a slurmd tells its attempts apart by the second, and does not start what seems to be
    the one that is over ("Job credential revoked"), of which the job fails with 1.
    """
    on(lab, "ctl", "scontrol", "update", f"jobid={job_id}", "starttime=now+2")


class LabJob(Campaign):
    """One run directory, and the jobs that run on it.

    Attributes:
        script: what the batch script does with `$RUN`, the command.
        options: of sbatch, beside those that every job has.
    """

    def __init__(self, lab: Lab, directory: Path, **config: Any) -> None:
        super().__init__(directory, **config)
        self.lab = lab
        self.script = "exec $RUN"
        self.options: list[str] = []
        self.job_id = ""

    def start(self, *overrides: str) -> "LabJob":
        """Submit it; returns at once."""
        out = self.directory / "output"
        out.touch()
        self._out_from = out.stat().st_size
        command = " ".join([sys.executable, "-m", "resilient", "run", str(self.path), *overrides])
        script = self.directory / "job.sh"
        script.write_text(f"#!/bin/sh\nexport PYTHONPATH={CODE}\ncd {self.directory}\nRUN='{command}'\n{self.script}\n")
        nodes = self.config["cluster"]["nodes"] + self.config["cluster"].get("spares", 0)
        common = ["--parsable", "--no-kill", "--exclusive", f"--nodes={nodes}", f"--output={out}", "--open-mode=append"]
        self.job_id = on(self.lab, "ctl", "sbatch", *common, *self.options, str(script)).strip()
        return self

    def state(self) -> dict[str, str]:
        """What Slurm says of the job."""
        told = self.lab.controller.ask("scontrol", "--oneliner", "show", "job", self.job_id) or ""
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def _ended(self) -> bool:
        return self.state().get("JobState", "PENDING") not in RUNNING

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """The exit code of the batch script; what it printed is in `output` then."""
        wait_for(self._ended, f"the end of the job: {self.state()}\n{self._printed()}\n{self.logs()}", patience_s)
        self.output = self._printed()
        return int(self.state()["ExitCode"].split(":")[0])

    def _printed(self) -> str:
        return (self.directory / "output").read_text()[self._out_from :]

    def signal(self, sig: signal.Signals) -> None:
        on(self.lab, "ctl", "scancel", "--batch", f"--signal={sig.name.removeprefix('SIG')}", self.job_id)

    def hosts(self) -> dict[int, str]:
        """The host of each node that has had an agent in a step that is there, the batch host first as in every job here."""
        steps = self.steps()
        found = dict(enumerate(sorted(host for name, hosts in steps if name == "agents" for host in hosts)))
        return found | {int(name[5:]): host for name, hosts in steps if name[5:].isdigit() for host in hosts}

    def steps(self) -> list[tuple[str, list[str]]]:
        """The job's steps with agents that are there: name and hosts."""
        told = self.lab.controller.ask("squeue", "--noheader", "--steps", "--job", self.job_id, "--format", "%j %N") or ""
        pairs = [line.split() for line in told.splitlines()]
        return [(name, expand(hosts)) for name, hosts in pairs if name.startswith("agent")]


@pytest.fixture
def job(lab: Lab, dataset: Path, tmp_path: Path) -> Callable[..., LabJob]:
    """A campaign of the real trainer on three hosts, with what is told otherwise."""

    def make(**changes: Any) -> LabJob:
        return LabJob(lab, _directory(tmp_path / "job"), **_config(dataset, **changes))

    return make


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def _config(dataset: Path, **changes: Any) -> dict[str, Any]:
    cluster = {"nodes": 3, "procs_per_node": 1, "threads_per_proc": 1, "device": "cpu", **changes.pop("cluster", {})}
    steps = changes.pop("steps", STEPS)
    return {
        "cluster": cluster,
        "model": MODEL,
        "data": {"path": str(dataset)},
        "train": {"steps": steps, "global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2, **TRAIN},
        "optimizer": {"warmup_samples": 32, "decay_samples": GLOBAL_BATCH * STEPS},
        "checkpoint": {"every_steps": 10},
        **changes,
    }


@pytest.fixture
def keeping(lab: Lab, tmp_path: Path) -> Callable[..., LabJob]:
    """A campaign of `keeping` on three hosts: where not the trainer is asked, but who goes on and that no bit is different."""

    def make(**changes: Any) -> LabJob:
        return LabJob(lab, _directory(tmp_path / "job"), **_keeping(**changes))

    return make


def _keeping(**changes: Any) -> dict[str, Any]:
    return {
        "entrypoint": "keeping:train",
        "args": {"step_s": 0.1},
        "cluster": {"nodes": 3, "procs_per_node": 1, "threads_per_proc": 1, "device": "cpu", **changes.pop("cluster", {})},
        "train": {"steps": STEPS},
        "checkpoint": {"every_steps": 10},
        **changes,
    }


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """The same campaign of `keeping` on this machine alone, in which nothing happens."""
    return finished(tmp_path_factory, "kept", STEPS, **_keeping(args={"step_s": 0.0}))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Campaign:
    """The same campaign on this machine alone, in which nothing happens."""
    return finished(tmp_path_factory, "twin", STEPS, **_config(dataset))
