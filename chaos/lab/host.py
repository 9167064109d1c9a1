"""One host of the lab: namespaces of its own for network, processes, mounts and its name.

Owns nothing in memory: what is known of a host is read from the kernel, so that any process can break it, mend it or remove it. Its
processes live under an init of their own; when that one is killed the kernel ends all others, and what the host held in RAM and
on its NVMe is gone with its mounts.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from chaos.lab.shape import LOGIN, NVME, LabPaths, Shape, address, prefix_length
from resilient.exits import EnvironmentUnusable

GONE_S = 10.0
BRIDGE = "switch"
# What daemons of a lab do not take over from who starts them: a job of Slurm, and the marks by which an experiment ends what is its
# own. An injector's guard boots a host again, which outlives both.
_NOT_THEIRS = ("SLURM_", "RESILIENT_CHAOS_")

_REST = "import signal, time; signal.signal(signal.SIGCHLD, signal.SIG_IGN); time.sleep(1e9)"  # orphans that end are buried

# $1: name, $2: hosts file, $3: spool directory, $4: size of a disk in MiB. Runs as the host's first process, in its namespaces.
_BOOT = f"""
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t sysfs sysfs /sys
mount -t tmpfs cgroup /sys/fs/cgroup
mount -t tmpfs -o "size=$4m,mode=1777" shm /dev/shm
mount -t tmpfs -o "size=$4m,mode=1777" nvme {NVME}
mount -t tmpfs spool "$3"
echo ready
exec {sys.executable} -I -S -c '{_REST}' < /dev/null > /dev/null 2>&1
"""


class CommandFailed(EnvironmentUnusable):
    """A command that builds or breaks the lab did not work."""


def command(*words: str | Path) -> str:
    """Run a command of the machine; what it printed.

    Raises:
        CommandFailed: with what it said.
    """
    completed = subprocess.run([str(word) for word in words], check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if completed.returncode:
        said = (completed.stderr or completed.stdout).strip()
        raise CommandFailed(f"`{shlex.join(str(word) for word in words)}` failed with status {completed.returncode}: {said}")
    return completed.stdout


def namespaces() -> list[str]:
    """Names of all network namespaces of the machine."""
    directory = Path("/run/netns")
    return sorted(entry.name for entry in directory.iterdir()) if directory.exists() else []


class Host:
    """A host by its name, whether it is there or not."""

    def __init__(self, place: LabPaths, name: str) -> None:
        self.paths = place
        self.name = name
        self.namespace = place.namespace(name)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether anything of it is there."""
        return self.namespace in namespaces()

    def processes(self) -> list[int]:
        """Ids, on the machine, of what runs in its network."""
        if not self.exists():
            return []
        try:
            return [int(word) for word in command("ip", "netns", "pids", self.namespace).split()]
        except CommandFailed:
            if self.exists():
                raise
            return []  # it went at this moment

    def init(self) -> int | None:
        """Id, on the machine, of its first process; None if the host is not up."""
        first = [(len(ids), pid) for pid in self.processes() if (ids := _ids(pid)) and ids[-1] == 1]
        return min(first)[1] if first else None

    def link_is_up(self) -> bool:
        """Whether the port of the switch is up that its link leads to."""
        switch = Host(self.paths, LOGIN)
        completed = subprocess.run(
            ["ip", "-n", switch.namespace, "link", "show", self.name], check=False, capture_output=True, text=True
        )
        return completed.returncode == 0 and ",UP" in completed.stdout.partition("<")[2].partition(">")[0]

    # -- from nothing and back -----------------------------------------------------------------------------------------

    def boot(self, shape: Shape) -> None:
        """Bring it up, empty. There must be nothing of it.

        Raises:
            CommandFailed: the machine does not let it.
        """
        command("ip", "netns", "add", self.namespace)
        command("ip", "-n", self.namespace, "link", "set", "lo", "up")
        self._plug_in()
        self._start_init(shape)

    def _plug_in(self) -> None:
        inside = f"{address(self.name)}/{prefix_length()}"
        if self.name == LOGIN:
            command("ip", "-n", self.namespace, "link", "add", BRIDGE, "type", "bridge")
            command("ip", "-n", self.namespace, "addr", "add", inside, "dev", BRIDGE)
            command("ip", "-n", self.namespace, "link", "set", BRIDGE, "up")
            return
        switch = self.paths.namespace(LOGIN)
        peer = ["peer", "name", "eth0", "netns", self.namespace]
        command("ip", "-n", switch, "link", "add", self.name, "type", "veth", *peer)
        command("ip", "-n", switch, "link", "set", self.name, "master", BRIDGE, "up")
        command("ip", "-n", self.namespace, "addr", "add", inside, "dev", "eth0")
        command("ip", "-n", self.namespace, "link", "set", "eth0", "up")

    def _start_init(self, shape: Shape) -> None:
        into = ["setsid", "--fork", "nsenter", f"--net=/run/netns/{self.namespace}"]
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount", "--mount-proc"]
        arguments = [self.name, self.paths.hosts_file, self.paths.spool, shape.disk_mib]
        log = self.paths.logs / f"{self.name}.log"
        with log.open("ab") as errors:
            starter = subprocess.Popen(
                [*into, *apart, "sh", "-c", _BOOT, "sh", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                env=daemon_environ(),
            )
            assert starter.stdout is not None
            with starter.stdout as output:
                ready = output.readline()
            starter.wait()
        if ready != b"ready\n":
            raise CommandFailed(f"host {self.name} did not come up: {log.read_text().strip()[-500:]}")

    def crash(self) -> None:
        """It falls silent at once and is gone: link, processes, and what its RAM and its NVMe held."""
        if not self.exists():
            return
        if self.name != LOGIN:
            self.set_link(up=False)  # first, so that nobody hears a word of its end
        self.remove()

    def remove(self) -> None:
        """End all that runs on it and take away its network.

        Raises:
            CommandFailed: something does not end.
        """
        deadline = time.monotonic() + GONE_S
        init = self.init()
        if init is not None:
            _kill(init)  # and with it, all at once, what runs under it
        while processes := self.processes():
            for pid in processes:
                _kill(pid)
            if time.monotonic() > deadline:
                raise CommandFailed(f"processes {processes} of host {self.name} do not end")
            time.sleep(0.01)
        if self.name != LOGIN:
            # Sockets that nobody holds any more keep a network alive, and with it its end of the link, until they have timed out.
            subprocess.run(self._port("del"), check=False, capture_output=True)
        if self.exists():
            command("ip", "netns", "del", self.namespace)

    # -- its link ------------------------------------------------------------------------------------------------------

    def set_link(self, *, up: bool) -> None:
        """Bring the switch's port for it up, or down: carrier is lost, addresses and routes stay, as with a pulled cable."""
        if subprocess.run(self._port("show"), check=False, capture_output=True).returncode == 0:
            command(*self._port("set", "up" if up else "down"))

    def flap(self, seconds: float) -> None:
        """Take its link down for so long. It comes back even if this process is killed meanwhile."""
        down, up = (shlex.join(self._port("set", state)) for state in ("down", "up"))
        script = f"trap '' HUP INT TERM; {down} && sleep {seconds:f}; {up}"
        # Not `run`, which kills what it runs when it is interrupted.
        flapping = subprocess.Popen(["sh", "-c", script], stdin=subprocess.DEVNULL, start_new_session=True)
        if flapping.wait():
            raise CommandFailed(f"the link of host {self.name} could not be taken down and brought up again")

    def _port(self, action: str, *state: str) -> list[str]:
        return ["ip", "-n", self.paths.namespace(LOGIN), "link", action, self.name, *state]

    # -- commands on it ------------------------------------------------------------------------------------------------

    def inside(self, words: Sequence[str | Path], environ: Mapping[str, str], directory: Path) -> list[str]:
        """The command line that runs a command there.

        Args:
            environ: variables to set.
            directory: to run it in.

        Raises:
            EnvironmentUnusable: the host is not up.
        """
        init = self.init()
        if init is None:
            raise EnvironmentUnusable(f"host {self.name} of the lab is not up")
        unset = [part for name in os.environ if name.startswith("SLURM_") for part in ("--unset", name)]
        settings = [f"{name}={value}" for name, value in environ.items()]
        enter = ["nsenter", "--target", str(init), "--mount", "--uts", "--net", "--pid", "--"]
        return [*enter, "env", f"--chdir={directory}", *unset, *settings, *map(str, words)]


def daemon_environ() -> dict[str, str]:
    """What a daemon of the lab has of this process's environment."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_THEIRS)}


def _ids(pid: int) -> list[int]:
    """Ids of a process in its own namespace and in those around it, this one first; none if it has gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
