"""The links of a node: its network interfaces, its InfiniBand ports and its TCP, sampled, and what has changed between two samples.

Owns the open files of sysfs and proc that tell. What a change means is for the driver to say; here nothing is decided. `compare`
and `burst` are pure, the clock comes with the samples.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

State = Literal["down", "up", "flapped", "ib_errors", "retransmissions"]

CARRIER = ("carrier_up_count", "carrier_down_count")
IB_ERRORS = ("link_error_recovery", "symbol_error", "port_rcv_errors", "port_xmit_discards")
IB_COUNTERS = ("link_downed", *IB_ERRORS)

TCP_WINDOW_S = 1.0
TCP_WINDOW_IN_BURST_S = 10.0  # retransmissions that go on are told no more often
BURST_TIMEOUTS = 2  # timers that ran out, which one connection to nowhere makes in a second; rare while anything gets through
BURST_RETRANSMITTED = 20  # segments, and they are ...
BURST_SHARE = 0.01  # ... at least so much of all that was sent


@dataclass(frozen=True)
class Link:
    """One link in one sample.

    Attributes:
        trouble: why it carries nothing, in a word or two; empty while it is up.
        counters: what the kernel or the hardware counts, since it was made or reset.
    """

    trouble: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return not self.trouble


@dataclass(frozen=True)
class Sample:
    """All links at one time `t` (seconds, any origin), by name."""

    t: float
    links: Mapping[str, Link]


@dataclass(frozen=True)
class Tcp:
    """What the TCP of a network namespace has done up to `t` (seconds, any origin): segments, and timers that ran out."""

    t: float
    sent: int
    retransmitted: int
    timeouts: int


@dataclass(frozen=True)
class Change:
    """What has happened to a link.

    Attributes:
        interface: its name; an InfiniBand port as `mlx5_0:1`; None for TCP, which is the whole node's.
        state: `down`; `up` again; `flapped`, both between two samples; or counters that rose.
        down_s: for `up`, how long it was down at a stretch, to about the time between two samples; for `flapped`, the time
            between the samples, which it cannot have exceeded; else None.
        detail: why it is down.
        counters: which counters rose since the sample before, and by how much.
    """

    interface: str | None
    state: State
    down_s: float | None = None
    detail: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)


def compare(before: Sample, after: Sample, down_since: Mapping[str, float]) -> list[Change]:
    """What has happened to the links between two samples, in order.

    Args:
        down_since: when links that were down in `before` were first seen so, on the samples' clock.
    """
    changes: list[Change] = []
    for name, link in after.links.items():
        was = before.links[name]
        rises = _rises(was.counters, link.counters)
        errors = {key: rises.pop(key) for key in IB_ERRORS if key in rises}
        stretch_s = after.t - down_since.get(name, before.t)
        if was.up and link.up:
            if "carrier_down_count" in rises or "link_downed" in rises:
                changes.append(Change(name, "flapped", after.t - before.t, counters=rises))
        elif was.up:
            changes.append(Change(name, "down", detail=link.trouble, counters=rises))
        elif link.up:
            changes.append(Change(name, "up", stretch_s, counters=rises))
        elif "carrier_up_count" in rises:  # it has been up for a moment, so that a new stretch has begun
            changes.append(Change(name, "up", stretch_s, counters=rises))
            changes.append(Change(name, "down", detail=link.trouble))
        if errors:
            changes.append(Change(name, "ib_errors", counters=errors))
    return changes


def _rises(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """By how much counters rose; one that fell was reset in between, and one that was not there before says nothing."""
    rises = {name: count - before[name] if count >= before[name] else count for name, count in after.items() if name in before}
    return {name: rise for name, rise in rises.items() if rise}


def burst(before: Tcp, after: Tcp) -> Change | None:
    """The change if TCP has retransmitted conspicuously much between two readings, else None."""
    retransmitted = after.retransmitted - before.retransmitted
    timeouts = after.timeouts - before.timeouts
    lossy = retransmitted >= max(BURST_RETRANSMITTED, BURST_SHARE * (after.sent - before.sent))
    if timeouts < BURST_TIMEOUTS and not lossy:
        return None
    return Change(None, "retransmissions", counters={"RetransSegs": retransmitted, "TCPTimeouts": timeouts})


# -- which links are in use ----------------------------------------------------------------------------------------------


def in_use(
    addresses: Mapping[str, Collection[str]], own: Collection[str], environ: Mapping[str, str], bridges: Collection[str] = ()
) -> list[str]:
    """The interfaces that matter: those that carry an address of the node, or that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name.

    The loopback alone is no link that could fail; where it is all that was found, every other interface with an address of its
    own counts too, except bridges, whose carrier comes and goes with containers.

    Args:
        addresses: the IP addresses of every interface.
        own: at which the other nodes reach this one.
        bridges: which of the interfaces are bridges.
    """
    gloo = environ.get("GLOO_SOCKET_IFNAME", "")
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")

    def chosen(name: str, ips: Collection[str]) -> bool:
        return any(ip in own for ip in ips) or _named(f"={gloo}", name) or bool(ips and _named(nccl, name))

    found = [name for name, ips in addresses.items() if chosen(name, ips)]
    if any(not _is_loopback(addresses[name]) for name in found):
        return found
    return found + [name for name, ips in addresses.items() if _leads_away(ips) and name not in bridges]


def _is_loopback(ips: Collection[str]) -> bool:
    return bool(ips) and all(ipaddress.ip_address(ip).is_loopback for ip in ips)


def _leads_away(ips: Collection[str]) -> bool:
    """Whether one of the addresses can be reached from elsewhere."""
    found = map(ipaddress.ip_address, ips)
    return any(not ip.is_loopback and not ip.is_link_local for ip in found)


def _named(pattern: str, name: str) -> bool:
    """Whether NCCL would take this interface or `device:port`: `a,b` are prefixes, `=a,b` names, `^` is before what it avoids."""
    wanted = pattern.removeprefix("^")
    items = [item for item in wanted.removeprefix("=").split(",") if item]
    if not items:
        return False
    exact = {name, name.partition(":")[0]}
    hit = any(item in exact if wanted.startswith("=") else name.startswith(item) for item in items)
    return hit != pattern.startswith("^")


def interfaces_of(address: str, environ: Mapping[str, str], *, sys: Path = Path("/sys")) -> list[str]:
    """The interfaces in use on this machine: `in_use` for the node that the others reach at `address`, a name or a number."""
    own = {address}
    with contextlib.suppress(OSError):
        own |= {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    addresses = {
        name: [each.address.partition("%")[0] for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }
    bridges = [name for name in addresses if (sys / "class/net" / name / "bridge").is_dir()]
    return in_use(addresses, own, environ, bridges)


def interface_of(address: str) -> str | None:
    """The interface that has this address; None for a name, or where there is none."""
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return name
    return None


def ports_of(environ: Mapping[str, str], *, sys: Path = Path("/sys")) -> list[Path]:
    """The directories of the InfiniBand (and RoCE) ports in use: those that NCCL_IB_HCA takes, else all."""
    ports = sorted((sys / "class/infiniband").glob("*/ports/*"))
    pattern = environ.get("NCCL_IB_HCA", "")
    return [port for port in ports if not pattern or _named(pattern, _port_name(port))]


def _port_name(port: Path) -> str:
    return f"{port.parts[-3]}:{port.name}"


def _with_interface(port: Path) -> str:
    """A port's name, with that of the interface that belongs to it where there is one: `mlx5_0:1 (ib0)`."""
    try:
        interface = (port / "gid_attrs/ndevs/0").read_text().strip()
    except OSError:
        found = list((port.parents[1] / "device/net").glob("*"))
        interface = found[0].name if len(found) == 1 else ""
    return f"{_port_name(port)} ({interface})" if interface else _port_name(port)


# -- sampling ------------------------------------------------------------------------------------------------------------


class _Files:
    """Small files of one directory of sysfs or proc, opened once and read often."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fds: dict[str, int] = {}

    def read(self, name: str, limit: int = 256) -> bytes:
        """Raises OSError if what the file belongs to has gone; `close`, and it is looked for anew."""
        fd = self._fds.get(name)
        if fd is None:
            fd = self._fds[name] = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, limit, 0)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


class LinkWatch:
    """Polls links, and returns what has changed since the last poll.

    Args:
        interfaces: names of network interfaces.
        ports: directories of InfiniBand ports, `/sys/class/infiniband/<device>/ports/<number>`.
        clock: seconds, any origin.
    """

    def __init__(
        self,
        interfaces: Iterable[str],
        ports: Sequence[Path] = (),
        *,
        sys: Path = Path("/sys"),
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interfaces = {name: _Files(sys / "class/net" / name) for name in interfaces}
        self._ports = {_with_interface(port): _Port(port) for port in ports}
        self._proc = _Files(proc / "net")
        self._clock = clock
        self._sample = self._take()
        self._down_since = {name: self._sample.t for name, link in self._sample.links.items() if not link.up}
        self._tcp = self._take_tcp()
        self._tcp_window_s = TCP_WINDOW_S

    @property
    def names(self) -> list[str]:
        """The links that are watched."""
        return list(self._sample.links)

    @property
    def links(self) -> Mapping[str, Link]:
        """How they were at the last poll."""
        return self._sample.links

    def poll(self) -> list[Change]:
        """Take a sample; what has changed since the one before."""
        before, self._sample = self._sample, self._take()
        changes = compare(before, self._sample, self._down_since)
        for change in changes:
            if change.interface is not None and change.state == "down":
                self._down_since[change.interface] = self._sample.t
        if self._tcp is not None and self._sample.t - self._tcp.t >= self._tcp_window_s:
            last, self._tcp = self._tcp, self._take_tcp()
            conspicuous = burst(last, self._tcp) if self._tcp is not None else None
            self._tcp_window_s = TCP_WINDOW_IN_BURST_S if conspicuous is not None else TCP_WINDOW_S
            changes += [conspicuous] if conspicuous is not None else []
        return changes

    def close(self) -> None:
        """Close the files."""
        for files in (self._proc, *self._interfaces.values()):
            files.close()
        for port in self._ports.values():
            port.close()

    def _take(self) -> Sample:
        links = {name: _interface(files) for name, files in self._interfaces.items()}
        links |= {name: port.read() for name, port in self._ports.items()}
        return Sample(self._clock(), links)

    def _take_tcp(self) -> Tcp | None:
        """None where the kernel does not tell."""
        try:
            tcp = _columns(self._proc.read("snmp", 1 << 15), b"Tcp:")
            more = _columns(self._proc.read("netstat", 1 << 15), b"TcpExt:")
            return Tcp(self._clock(), tcp[b"OutSegs"], tcp[b"RetransSegs"], more[b"TCPTimeouts"])
        except (OSError, KeyError, ValueError):
            return None


def _interface(files: _Files) -> Link:
    # The counters first: a link that goes down between the two reads is then found down, and not taken for one that flapped.
    # `operstate` is not asked: the kernel brings it up to date up to a second late.
    counters: dict[str, int] = {}
    try:
        for name in CARRIER:
            counters[name] = int(files.read(name))
        return Link("" if files.read("carrier").strip() == b"1" else "no carrier", counters)
    except OSError as error:
        if error.errno == errno.EINVAL:  # what `carrier` says of an interface that is not up
            return Link("taken down on the node", counters)
        files.close()
        return Link("the interface is gone")


class _Port:
    """The files of one InfiniBand port."""

    def __init__(self, directory: Path) -> None:
        self._files = _Files(directory)
        self._counters = [name for name in IB_COUNTERS if (directory / "counters" / name).exists()]

    def read(self) -> Link:
        counters: dict[str, int] = {}
        try:
            for name in self._counters:
                with contextlib.suppress(ValueError):  # `N/A (no PMA)` where the hardware does not count
                    counters[name] = int(self._files.read(f"counters/{name}"))
            state, physical = (self._files.read(name).decode().partition(":")[2].strip() for name in ("state", "phys_state"))
        except OSError:
            self._files.close()
            return Link("the port is gone")
        return Link("" if state == "ACTIVE" else f"{state}, {physical}", counters)

    def close(self) -> None:
        self._files.close()


def _columns(text: bytes, protocol: bytes) -> dict[bytes, int]:
    """One protocol of /proc/net/snmp or netstat: a line of names, a line of numbers."""
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith(protocol + b" "))
    return dict(zip(names, map(int, values), strict=True))
