"""The roster of a step: which node of the run each of its hosts is. Pure.

Slurm orders the tasks of a step as it likes, and the nodes that are used may be a part of the allocation only. So a step says by
host name who is who, and each agent finds itself under the name that Slurm has given it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from resilient.exits import EnvironmentUnusable
from resilient.slurm.hosts import LIMIT, expand, fold

VARIABLE = "RESILIENT_ROSTER"  # in the environment of a step
NODE_NAME = "SLURMD_NODENAME"

_ENTRY = re.compile(r"(\d{1,9}):(\d{1,9}):(.+)", re.ASCII)


@dataclass(frozen=True)
class Seat:
    """What an agent is: the index of its node, and how many agents this node has had with this one."""

    node: int
    incarnation: int


def write(seats: Mapping[str, Seat]) -> str:
    """A roster as text: `<incarnation>:<first node>:<hosts>;...`, where nodes of following numbers share an entry.

    Args:
        seats: by host name, one at the least.
    """
    runs: list[tuple[Seat, list[str]]] = []
    for host, seat in sorted(seats.items(), key=lambda item: item[1].node):
        if runs and runs[-1][0] == Seat(seat.node - len(runs[-1][1]), seat.incarnation):
            runs[-1][1].append(host)
        else:
            runs.append((seat, [host]))
    return ";".join(f"{first.incarnation}:{first.node}:{fold(hosts)}" for first, hosts in runs)


def read(text: str) -> dict[str, Seat]:
    """The roster that `write` has written. Raises ValueError."""
    found: dict[str, Seat] = {}
    for entry in text.split(";"):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ValueError(f"{entry!r} is no entry of a roster")
        first = int(match[2])
        found |= {host: Seat(first + place, int(match[1])) for place, host in enumerate(expand(match[3]))}
        if len(found) > LIMIT:
            raise ValueError(f"a roster of more than {LIMIT} hosts")
    return found


def seat_of(environ: Mapping[str, str], own: str) -> Seat:
    """The seat of this process, by Slurm's name for its host, or where that is not told by the host's own.

    Args:
        environ: of the process.
        own: name of this host, with its domain or without.

    Raises:
        EnvironmentUnusable: the roster is missing, cannot be read, or does not name this host.
    """
    try:
        seats = read(environ[VARIABLE])
    except (KeyError, ValueError) as error:
        raise EnvironmentUnusable(f"{VARIABLE} does not tell which node this is: {error}") from None
    names = [environ[NODE_NAME]] if NODE_NAME in environ else [own, own.partition(".")[0]]
    for name in names:
        if name in seats:
            return seats[name]
    raise EnvironmentUnusable(f"{names[0]} is none of the nodes of this step: {environ[VARIABLE]}")
