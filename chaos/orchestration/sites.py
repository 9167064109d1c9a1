"""Sites: where a campaign runs, and how commands come to its nodes.

On this machine; on the hosts of a lab, as a job of its Slurm; or in the job of Slurm that this process is part of.
"""

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from chaos.fault import Need
from chaos.lab.lab import Lab
from chaos.lab.shape import LOGIN, Shape, SlurmTimes
from resilient.config import Config
from resilient.exits import EnvironmentUnusable
from resilient.slurm.allocation import JOB, Allocation

ASK_S = 0.5  # between questions to Slurm
PATIENT = SlurmTimes(slurmd_timeout_s=300)  # as Slurm has it by itself: a host that is cut off for a minute stays in its job
_RUNNING = {"PENDING", "RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "REQUEUED", "COMPLETING"}


class Started(Protocol):
    """A campaign's command that was started."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def stop(self) -> None:
        """Ask it to stop at its next step."""


class Site(Protocol):
    """A place where campaigns run."""

    has: frozenset[Need]
    lab: str

    def run(self, words: Sequence[str], environ: Mapping[str, str], output: Path, nodes: int) -> Started:
        """Start a campaign's command; what it prints is added to a file."""

    def hosts(self) -> Mapping[str, Sequence[str]]:
        """What stands before a command for each of its hosts, by name; this one has none."""

    def reach(self, host: str) -> list[str]:
        """What stands before a command that is to run on a host; empty: nothing.

        Raises:
            EnvironmentUnusable: the host is none of this site's.
        """


class _Process:
    def __init__(self, words: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        with output.open("a") as out:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)


def rights() -> frozenset[Need]:
    """What this process may do."""
    return frozenset({Need.ROOT} if os.geteuid() == 0 else ())


class Here:
    """This machine, however many nodes it stands for."""

    lab = ""

    def __init__(self) -> None:
        self.has = rights() | {Need.ONE_MACHINE}

    def run(self, words: Sequence[str], environ: Mapping[str, str], output: Path, nodes: int) -> Started:
        return _Process(words, environ, output)

    def hosts(self) -> Mapping[str, Sequence[str]]:
        return {"": ()}

    def reach(self, host: str) -> list[str]:
        if host not in ("", socket.gethostname()):
            raise EnvironmentUnusable(f"the campaign runs on {host}, and this is {socket.gethostname()}, outside of any job")
        return []


class InJob:
    """The job of Slurm that this process is part of: on its batch host, as the campaign's driver, or in the shell of `salloc`.

    Args:
        here: name of this host, which need not be one of the job's.
    """

    lab = ""

    def __init__(self, allocation: Allocation, here: str) -> None:
        self.has = rights() | {Need.SLURM} | ({Need.ONE_MACHINE} if len(allocation.hosts) == 1 else frozenset())
        self._allocation, self._here = allocation, here

    def run(self, words: Sequence[str], environ: Mapping[str, str], output: Path, nodes: int) -> Started:
        return _Process(words, environ, output)

    def hosts(self) -> Mapping[str, Sequence[str]]:
        own: dict[str, Sequence[str]] = {} if self._here in self._allocation.hosts else {"": ()}  # of the driver
        return own | {host: self.reach(host) for host in self._allocation.hosts}

    def reach(self, host: str) -> list[str]:
        if host in ("", self._here, socket.gethostname()):
            return []
        if host not in self._allocation.hosts:
            hosts = ", ".join(self._allocation.hosts)
            raise EnvironmentUnusable(f"{host} is no node of job {self._allocation.job_id}, which has {hosts}")
        step = ["srun", "--jobid", self._allocation.job_id, "--overlap", "--nodelist", host, "--nodes", "1", "--ntasks", "1"]
        return [*step, "--mem", "0", "--cpu-bind", "none", "--quiet", "--export", "ALL", "--job-name", "injector"]


@dataclass
class _Job:
    """A job of the lab's Slurm."""

    lab: Lab
    job_id: str
    asked_t: float = 0.0

    def poll(self) -> int | None:
        if time.monotonic() < self.asked_t + ASK_S:
            return None
        self.asked_t = time.monotonic()
        output = self.lab.controller.ask("scontrol", "--oneliner", "show", "job", self.job_id) or ""
        state = dict(word.split("=", 1) for word in output.split() if "=" in word)
        if state.get("JobState", "PENDING") in _RUNNING:
            return None
        code, _, number = state["ExitCode"].partition(":")
        return int(code) or -int(number)

    def stop(self) -> None:
        self.lab.controller.ask("scancel", "--batch", "--signal=TERM", self.job_id)


class InLab:
    """Hosts of a lab with Slurm."""

    def __init__(self, lab: Lab) -> None:
        self.has = rights() | {Need.LAB, Need.SLURM} | ({Need.ONE_MACHINE} if len(lab.shape().names) == 1 else frozenset())
        self.lab = lab.paths.name
        self._lab = lab

    @classmethod
    def up(cls, lab: Lab, hosts: int) -> "InLab":
        """Bring a lab up.

        Raises:
            EnvironmentUnusable: something is missing, or one of this name is up.
        """
        if not lab.up(Shape(hosts=hosts, slurm=True, times=PATIENT)):
            raise EnvironmentUnusable(f"a lab of the name {lab.paths.name} is up already")
        return cls(lab)

    def run(self, words: Sequence[str], environ: Mapping[str, str], output: Path, nodes: int) -> Started:
        script = output.with_suffix(".sh")
        script.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
        options = ["--parsable", "--no-kill", "--exclusive", f"--nodes={nodes}", f"--output={output}", "--open-mode=append"]
        line = self._lab.command(["sbatch", *options, str(script)], host=LOGIN, environ=environ)
        completed = subprocess.run(line, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if completed.returncode:
            raise EnvironmentUnusable(f"the lab's Slurm takes no job: {completed.stderr.strip()}")
        return _Job(self._lab, completed.stdout.strip())

    def hosts(self) -> Mapping[str, Sequence[str]]:
        return {"": (), **{host: self.reach(host) for host in self._lab.shape().all_names}}

    def reach(self, host: str) -> list[str]:
        return self._lab.command([], host=host)


def place(config: Config) -> Here | InJob:
    """Where a campaign of this config runs when it is started from here."""
    if config.cluster.launcher != "local" and JOB in os.environ:
        here = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        return InJob(Allocation.of(os.environ, here), here)
    return Here()
