"""What a lab consists of: names, addresses, and the files that its hosts read. Pure."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from resilient.exits import EnvironmentUnusable

ROOT = Path("/run/resilient-lab")
PREFIX = "rlab"  # of the names of all network namespaces
NVME = Path("/mnt/nvme")  # a host's node-local storage
LOGIN = "ctl"  # the host from which jobs are submitted, with the switch and Slurm's controller

_NETWORK = "10.88.0"
_MOST_HOSTS = 64


@dataclass(frozen=True)
class SlurmTimes:
    """What tests have Slurm do sooner than a site would.

    Attributes:
        slurmd_timeout_s: without a word of a node until it is down.
        kill_wait_s: between SIGTERM and SIGKILL at the time limit.
        grace_s: between SIGTERM and SIGKILL of a job that is preempted.
        max_time_min: time limit of the partition `limited`.
        message_timeout_s: for an answer of a node. One that is gone is down after several tries, so that with Slurm's own 10 s it
            takes about half a minute, however small `slurmd_timeout_s` is.
    """

    slurmd_timeout_s: int = 30
    kill_wait_s: int = 30
    grace_s: int = 30
    max_time_min: int = 1
    message_timeout_s: int = 10


@dataclass(frozen=True)
class Shape:
    """What is asked for.

    Attributes:
        hosts: how many, named n1, n2 and so on.
        slurm: whether Slurm runs on them.
        cpus: of each host, as Slurm counts them.
        disk_mib: most that a host's NVMe holds, and most that its RAM disk does.
    """

    hosts: int = 4
    slurm: bool = False
    cpus: int = 2
    disk_mib: int = 4096
    times: SlurmTimes = field(default_factory=SlurmTimes)

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= _MOST_HOSTS:
            raise EnvironmentUnusable(f"a lab has 1 to {_MOST_HOSTS} hosts, not {self.hosts}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the hosts that compute."""
        return tuple(f"n{number}" for number in range(1, self.hosts + 1))

    @property
    def all_names(self) -> tuple[str, ...]:
        """Of these and the one from which jobs are submitted, which comes first."""
        return (LOGIN, *self.names)


def address(host: str) -> str:
    """Of a host on the lab's network."""
    return f"{_NETWORK}.1" if host == LOGIN else f"{_NETWORK}.{10 + int(host[1:])}"


def prefix_length() -> int:
    """Bits of an address that stand for the lab's network."""
    return 24


@dataclass(frozen=True)
class LabPaths:
    """Where the traces of one lab are, so that they can be found without its help.

    Args:
        name: of the lab; several can be up side by side.
    """

    name: str = "lab"

    def __post_init__(self) -> None:
        if re.fullmatch(r"[a-z0-9]{1,16}", self.name) is None:
            raise EnvironmentUnusable(f"{self.name!r} is no name for a lab; allowed: up to 16 small letters and digits")

    @property
    def directory(self) -> Path:
        return ROOT / self.name

    @property
    def state(self) -> Path:
        return self.directory / "state.json"

    @property
    def hosts_file(self) -> Path:
        return self.directory / "hosts"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def spool(self) -> Path:
        """Of slurmd; what a host has there is its own, and goes with it."""
        return self.directory / "spool"

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    def namespace(self, host: str) -> str:
        """The network namespace of a host."""
        return f"{PREFIX}-{self.name}-{host}"

    def host_of(self, namespace: str) -> str | None:
        """The host of a network namespace; None if it is none of this lab's."""
        start = self.namespace("")
        return namespace.removeprefix(start) if namespace.startswith(start) else None


def hosts_text(shape: Shape) -> str:
    """What /etc/hosts says on every host."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", *(f"{address(name)} {name}" for name in shape.all_names)]
    return "".join(f"{line}\n" for line in lines)
