"""How a machine is set up, as far as faults change it: links, their queues, packet rules, the range of ports, mounts.

Owns the inspection, and the comparison of two. What this user may not read is taken to be empty, both before and after.
`python -m chaos.verdict.machine [PLACE ...]` prints it as a line of JSON.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from chaos.primitives.mounts import as_listed

State = Mapping[str, Sequence[str]]
"""Lines by what they are of."""

_COMMANDS = {
    "link": ("ip", "-o", "link"),
    "queue": ("tc", "qdisc", "show"),
    "rule": ("iptables-save",),
    "rule (IPv6)": ("ip6tables-save",),
    "rule set": ("nft", "--stateless", "list", "ruleset"),
}
MOUNTS, PORTS = Path("/proc/self/mountinfo"), Path("/proc/sys/net/ipv4/ip_local_port_range")
NAMES = (Path("/etc/hosts"), Path("/etc/resolv.conf"))  # over which is mounted what keeps names from leading anywhere
_CONTAINERS = "veth"  # links of containers, which come and go by themselves
# What is told of tables without a rule: that they are there, and let everything pass. Whoever asks first makes them.
_EMPTY = re.compile(
    r"\*\w+|COMMIT|:[A-Z]+ ACCEPT|table (ip|ip6) (filter|nat|mangle|raw|security) \{|chain [A-Z]+ \{|type .* policy accept;|\}"
)


def inspect(places: Sequence[Path] = ()) -> State:
    """The machine, or the host in whose namespaces this runs.

    Args:
        places: directories of a run: mounts over, at and below them count, and those over the files of `NAMES`; others do not.
    """
    found: dict[str, Sequence[str]] = {what: _lines(command) for what, command in _COMMANDS.items()}
    with suppress(OSError):
        found["range of ports"] = [" ".join(PORTS.read_text().split())]
    found["mount"] = [
        line for line in map(_mount, MOUNTS.read_text(errors="surrogateescape").splitlines()) if _concerns(line, (*places, *NAMES))
    ]
    return found


def changes(before: State, after: State) -> list[str]:
    """What is not as it was. Pure."""
    found = []
    for what in sorted({*before, *after}):
        old, new = list(before.get(what, ())), list(after.get(what, ()))
        found += [f"{what} is gone: {line}" for line in old if line not in new]
        found += [f"{what} is new: {line}" for line in new if line not in old]
        found += [f"{what} is doubled: {line}" for line in sorted({line for line in new if new.count(line) > old.count(line) > 0})]
    return found


def _lines(command: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # it is not there, or may not be run
        return []
    # Counters in brackets and comments with the time of day say nothing of the rules.
    lines = [line.partition(" [")[0] if line.startswith(":") else line for line in done.stdout.splitlines()]
    found = [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#") and _CONTAINERS not in line]
    return [line for line in found if not _EMPTY.fullmatch(line)]


def _mount(line: str) -> str:
    """Where, how, and what is mounted, of a line of mountinfo (proc(5)); without ids, which change."""
    words = line.split()
    dash = words.index("-")
    return f"{words[4]} {words[5]} {' '.join(words[dash + 1 :])}"


def _concerns(mount: str, places: Sequence[Path]) -> bool:
    point = Path(mount.split()[0])
    listed = [Path(as_listed(place)) for place in places]
    return any(place.is_relative_to(point) or point.is_relative_to(place) for place in listed)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(inspect([Path(word) for word in sys.argv[1:]])) + "\n")
