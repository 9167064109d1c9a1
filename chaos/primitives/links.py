"""What is done to a host's network, as commands: each with the one that undoes it, and does no harm where nothing was done.

A pure table. `namespace` is the network namespace of a host, `port` the end of its link at the switch, `mark` what tells the rules
of one fault from those of another: a number from 1 to 65534.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Command = tuple[str, ...]
DEVICE = "eth0"  # of every host
TRAFFIC = ("INPUT", "OUTPUT")
BURST_S = 0.02  # a cap lets through what it would have let through in that time, at once
LEAST_BURST_BYTES = 4000  # two packets of the usual size; larger ones are cut up by the queue


@dataclass(frozen=True)
class Change:
    """One thing that is done, and how it is undone."""

    do: Command
    undo: Command


def port(switch: str, name: str, *, up: bool) -> Command:
    """Bring a port of the switch up or down: carrier is lost, addresses and routes stay, as with a pulled cable."""
    return ("ip", "-n", switch, "link", "set", name, "up" if up else "down")


def unplugged(switch: str, name: str) -> Change:
    """A link is down."""
    return Change(port(switch, name, up=False), port(switch, name, up=True))


def dropped(namespace: str, chain: str, mark: int, *match: str) -> Change:
    """A host loses the packets that match, on their way in (`INPUT`) or out (`OUTPUT`)."""
    rule = (chain, *match, "-m", "comment", "--comment", _comment(mark), "-j", "DROP")
    return Change(_iptables(namespace, "-I", *rule), _iptables(namespace, "-D", *rule))


def lost_at_random(namespace: str, mark: int, share: float) -> Iterator[Change]:
    """Both ways, each packet with the same probability."""
    for chain, flag in zip(TRAFFIC, ("-i", "-o"), strict=True):
        yield dropped(namespace, chain, mark, flag, DEVICE, "-m", "statistic", "--mode", "random", "--probability", f"{share:.6f}")


def cut_off_from(namespace: str, mark: int, addresses: Sequence[str]) -> Iterator[Change]:
    """Nothing comes from these addresses, and nothing gets there."""
    for address in addresses:
        yield dropped(namespace, "INPUT", mark, "-s", address)
        yield dropped(namespace, "OUTPUT", mark, "-d", address)


def cut_off_from_port(namespace: str, mark: int, number: int) -> Iterator[Change]:
    """Whoever listens at this port, wherever, is neither heard nor reached."""
    yield dropped(namespace, "INPUT", mark, "-p", "tcp", "--sport", str(number))
    yield dropped(namespace, "OUTPUT", mark, "-p", "tcp", "--dport", str(number))


def capped(namespace: str, device: str, mark: int, mbit_per_s: float) -> Change:
    """What leaves by a device goes no faster."""
    handle = ("qdisc", "add", "dev", device, "root", "handle", f"{mark:x}:")
    burst_bytes = max(LEAST_BURST_BYTES, round(mbit_per_s * 1e6 / 8 * BURST_S))
    limits = ("tbf", "rate", f"{mbit_per_s * 1e6:.0f}bit", "burst", f"{burst_bytes}b", "latency", "400ms")
    return Change(("tc", "-n", namespace, *handle, *limits), ("tc", "-n", namespace, handle[0], "del", *handle[2:]))


def no_names(mark: int) -> str:
    """What a file says that stands in for /etc/hosts and /etc/resolv.conf alike, and knows nobody but the host itself."""
    return f"# {_comment(mark)}\n127.0.0.1 localhost\nnameserver 127.0.0.1\n"


def without_names(pid: int, mark: int, path: str) -> Iterator[Change]:
    """Where this process lives, no name leads anywhere. Args: path: of a file with what `no_names` says."""
    enter = ("nsenter", "--target", str(pid), "--mount", "--pid", "--")
    for name in ("/etc/hosts", "/etc/resolv.conf"):
        # One that is not ours stays: it may be the host's own.
        undo = f"if grep -q -w {_comment(mark)} {name}; then umount {name}; fi"
        yield Change((*enter, "mount", "--bind", path, name), (*enter, "sh", "-c", undo))


def packets(namespace: str, mark: int) -> tuple[Command, str]:
    """The command that tells how many packets the rules of a fault have dropped, and what its lines on them contain."""
    return _iptables(namespace, "-nvxL"), _comment(mark)


def _iptables(namespace: str, *words: str) -> Command:
    return ("ip", "netns", "exec", namespace, "iptables", "-w", *words)


def _comment(mark: int) -> str:
    return f"chaos-{mark}"
