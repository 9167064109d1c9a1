"""Slurm over the lab's hosts: a munged and a slurmctld on the host from which jobs are submitted, a slurmd on each other one.

Owns the files they read, and starts them; they end with their hosts. Nothing of a Slurm or munge that the machine has is used.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos.lab.host import CommandFailed, Host, daemon_environ
from chaos.lab.shape import LOGIN, LabPaths, Shape
from chaos.lab.slurm_conf import cgroup_conf, slurm_conf

START_S = 30.0


@dataclass(frozen=True)
class NodeState:
    """What Slurm says of a host: `idle`, `alloc`, `down`, with `*` where it does not answer."""

    name: str
    state: str


class Controller:
    """The lab's Slurm."""

    def __init__(self, place: LabPaths) -> None:
        self._place = place
        self._login = Host(place, LOGIN)

    def environ(self) -> dict[str, str]:
        """What commands need to find it."""
        return {"SLURM_CONF": str(self._place.slurm_conf)}

    def prepare(self, shape: Shape) -> None:
        """Write the files; the hosts need not be up."""
        place = self._place
        for directory in (place.slurm_conf.parent, place.directory / "slurmctld"):
            directory.mkdir(exist_ok=True)
        place.munge_socket.parent.mkdir(mode=0o755, exist_ok=True)
        memory_mib = psutil.virtual_memory().total // 2**20 // 2
        place.slurm_conf.write_text(slurm_conf(shape, place, memory_mib))
        (place.slurm_conf.parent / "cgroup.conf").write_text(cgroup_conf(_version()))
        descriptor = os.open(self._key, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as key:
            key.write(os.urandom(128))

    def start(self, shape: Shape) -> None:
        """Start all of it; returns when every host is ready for jobs.

        Raises:
            CommandFailed: it does not come up.
        """
        munge = self._place.munge_socket.parent
        options = [f"--socket={self._place.munge_socket}", f"--key-file={self._key}", f"--pid-file={munge / 'pid'}"]
        self._run(self._login, "munged", "--force", *options, f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}")
        self.start_controller()
        for name in shape.names:
            self.start_node(Host(self._place, name))
        self._wait(lambda: [each.state for each in self.nodes()] == ["idle"] * shape.hosts, "the hosts are not ready for jobs")

    def start_controller(self) -> None:
        """Start slurmctld, with the jobs that it knew of when it ended."""
        self._run(self._login, "slurmctld", "-f", self._place.slurm_conf)

    def kill_controller(self) -> None:
        """SIGKILL to slurmctld: what jobs ask of Slurm comes to nothing, until it is started again."""
        for pid in self._login.processes():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.name() == "slurmctld":
                    process.kill()
                    process.wait(START_S)

    def start_node(self, host: Host) -> None:
        """Start the slurmd of a host that is up."""
        self._run(host, "slurmd", "-N", host.name, "-f", self._place.slurm_conf)

    def nodes(self) -> list[NodeState]:
        """What Slurm says of each host; empty while the controller does not answer."""
        output = self.ask("sinfo", "--noheader", "--partition", "lab", "--Node", "--format", "%N %t")
        return [NodeState(*line.split()) for line in output.splitlines()] if output is not None else []

    def ask(self, *words: str) -> str | None:
        """What a command of Slurm prints on the host from which jobs are submitted; None if it fails."""
        line = self._login.inside(words, self.environ(), Path("/"))
        completed = subprocess.run(line, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return None if completed.returncode else completed.stdout

    @property
    def _key(self) -> Path:
        return self._place.munge_socket.parent / "key"

    def _run(self, host: Host, *words: str | Path) -> None:
        """Start a daemon, which is under way when its command returns."""
        log = self._place.logs / f"{host.name}.log"
        with log.open("ab") as output:
            line = host.inside(words, self.environ(), Path("/"))
            completed = subprocess.run(
                line, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=daemon_environ()
            )
        if completed.returncode:
            raise CommandFailed(f"{words[0]} did not start on {host.name}: {log.read_text().strip()[-500:]}")

    def _wait(self, ready: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            if time.monotonic() > deadline:
                states = ", ".join(f"{each.name} {each.state}" for each in self.nodes()) or "the controller does not answer"
                raise CommandFailed(f"{why} within {START_S:.0f} s: {states}; the logs are in {self._place.logs}")
            time.sleep(0.05)


def _version() -> tuple[int, ...]:
    version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0,)
