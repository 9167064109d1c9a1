"""The whole lab: up, down, and what becomes of its hosts in between.

Owns the lab's directory with the shape that was asked for, and the lock that one command at a time holds. Whatever else there is to
know is asked of the kernel and of Slurm, and `down` goes by names, so that it clears away what a command that was killed has left.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos.lab.controller import Controller
from chaos.lab.host import Host, namespaces
from chaos.lab.needs import demand
from chaos.lab.shape import LOGIN, NVME, PREFIX, ROOT, LabPaths, Shape, SlurmTimes, address, hosts_text
from resilient.exits import EnvironmentUnusable

_MADE_NVME = ROOT / "made-nvme"  # there if the mount point is not the machine's own


@dataclass(frozen=True)
class HostState:
    """How a host is.

    Attributes:
        state: `up` or `crashed`.
        link: `up` or `down`.
        slurm: what Slurm says of it; empty where there is none, or where it is not asked.
    """

    name: str
    address: str
    state: str
    link: str
    slurm: str


class Lab:
    """A lab by its name, whether it is up or not."""

    def __init__(self, place: LabPaths | None = None) -> None:
        self.paths = place or LabPaths()
        self.controller = Controller(self.paths)

    def host(self, name: str) -> Host:
        """One of its hosts.

        Raises:
            EnvironmentUnusable: it has none of this name.
        """
        names = self.shape().all_names
        if name not in names:
            raise EnvironmentUnusable(f"the lab has no host {name!r}; allowed: {', '.join(names)}")
        return Host(self.paths, name)

    def shape(self) -> Shape:
        """What it was asked to be.

        Raises:
            EnvironmentUnusable: it is not up.
        """
        found = self._recorded()
        if found is None:
            raise EnvironmentUnusable("the lab is not up; `resilient lab up` starts it")
        return found[0]

    def up(self, shape: Shape) -> bool:
        """Bring it up; whether there was anything to do.

        Raises:
            EnvironmentUnusable: something is missing, or a lab of another shape is up.
        """
        demand(slurm=shape.slurm)
        with self._locked():
            found = self._recorded()
            if found is not None and found[1] and Host(self.paths, LOGIN).init() is not None:
                if found[0] != shape:
                    raise EnvironmentUnusable("a lab of another shape is up; `resilient lab down` first")
                return False
            self._clear()
            try:
                self._build(shape)
            except BaseException:
                self._clear()
                raise
        return True

    def down(self) -> bool:
        """Remove all of it; whether there was anything."""
        with self._locked():
            found = self.paths.directory.exists() or bool(self._hosts())
            self._clear()
        return found

    def crash(self, name: str) -> None:
        """A host is gone, with all that it held; the one with the switch and the controller cannot."""
        host = self._computing(name)
        with self._locked():
            host.crash()

    def boot(self, name: str) -> None:
        """A host that crashed comes back, empty.

        Raises:
            EnvironmentUnusable: it is up.
        """
        host = self._computing(name)
        with self._locked():
            shape = self.shape()
            if host.init() is not None:
                raise EnvironmentUnusable(f"host {name} is up")
            host.remove()
            host.boot(shape)
            if shape.slurm:
                self.controller.start_node(host)

    def flap(self, name: str, seconds: float) -> None:
        """Take a host's link down for so long."""
        self._computing(name).flap(seconds)

    def command(self, words: Sequence[str | Path], *, host: str = LOGIN, environ: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs a command on a host, in the directory of this process, with the lab's Slurm at hand."""
        slurm = self.controller.environ() if self.shape().slurm else {}
        return self.host(host).inside(words, {**slurm, **(environ or {})}, Path.cwd())

    def status(self) -> list[HostState]:
        """How each host is; empty if the lab is not up."""
        found = self._recorded()
        if found is None:
            return []
        shape = found[0]
        asked = shape.slurm and Host(self.paths, LOGIN).init() is not None
        slurm = {each.name: each.state for each in self.controller.nodes()} if asked else {}
        return [self._state(name, slurm.get(name, "")) for name in shape.names]

    def _state(self, name: str, slurm: str) -> HostState:
        host = Host(self.paths, name)
        state, link = "up" if host.init() is not None else "crashed", "up" if host.link_is_up() else "down"
        return HostState(name, address(name), state, link, slurm)

    # -- on disk -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        ROOT.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(ROOT / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _recorded(self) -> tuple[Shape, bool] | None:
        """The shape that was asked for, and whether it was reached; None if there is no lab."""
        try:
            found = json.loads(self.paths.state.read_text())
        except (FileNotFoundError, ValueError):
            return None
        shape = found["shape"]
        return Shape(**{**shape, "times": SlurmTimes(**shape["times"])}), found["ready"]

    def _record(self, shape: Shape, *, ready: bool) -> None:
        fresh = self.paths.state.with_suffix(".new")
        fresh.write_text(json.dumps({"shape": asdict(shape), "ready": ready}))
        fresh.replace(self.paths.state)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _computing(self, name: str) -> Host:
        if name == LOGIN:
            raise EnvironmentUnusable(f"{LOGIN} holds the lab together; it stays up")
        return self.host(name)

    def _hosts(self) -> list[Host]:
        """Those of which there is anything; the one with the switch last."""
        names = [name for namespace in namespaces() if (name := self.paths.host_of(namespace)) is not None]
        return [Host(self.paths, name) for name in sorted(names, key=lambda name: name == LOGIN)]

    def _build(self, shape: Shape) -> None:
        place = self.paths
        for directory in (place.directory, place.logs, place.spool):
            directory.mkdir(mode=0o755)
        if not NVME.exists():
            _MADE_NVME.touch()
            NVME.mkdir(parents=True)
        self._record(shape, ready=False)
        place.hosts_file.write_text(hosts_text(shape))
        if shape.slurm:
            self.controller.prepare(shape)
        for name in shape.all_names:
            Host(place, name).boot(shape)
        if shape.slurm:
            self.controller.start(shape)
        self._record(shape, ready=True)

    def _clear(self) -> None:
        for host in self._hosts():
            host.remove()
        if self.paths.directory.exists():
            shutil.rmtree(self.paths.directory)
        if _MADE_NVME.exists() and not any(name.startswith(f"{PREFIX}-") for name in namespaces()):
            with suppress(OSError):
                NVME.rmdir()
            _MADE_NVME.unlink()
