"""Maintenance that is announced: reservations of Slurm that take nodes away from a job which still runs. Pure.

A reservation that lets jobs run on (IGNORE_JOBS) says when a node will be wanted. One or a few nodes of a job are left a while
before; where it is more, they are all to be maintained, and the job is over by then.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from resilient.slurm.hosts import expand
from resilient.slurm.queue import parse_time

FLAG = "MAINT"
LEAVE_S = 600.0  # before it begins, a node is left: steps may take minutes
MOST = 1 / 3  # of a job's nodes that are left while it goes on

_RECORD = re.compile(r"^ReservationName=(\S+) (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Reservation:
    """A maintenance. Attributes: start_t, end_t: unix seconds; hosts: that it takes."""

    name: str
    start_t: float
    end_t: float
    hosts: frozenset[str]


@dataclass(frozen=True)
class Ahead:
    """A maintenance that takes nodes of a job before its end.

    Attributes:
        nodes: of the job, by number.
        whole: they, and what else is taken then, are so many that the job is to be over by then; else they are left.
    """

    name: str
    start_t: float
    nodes: tuple[int, ...]
    whole: bool

    def due(self, now: float) -> bool:
        """Whether its nodes are to be left now."""
        return not self.whole and now >= self.start_t - LEAVE_S


def few(count: int, of: int) -> bool:
    """Whether so many nodes of a job are left, so that the others go on."""
    return count <= max(1, of * MOST)


def parse(text: str) -> Iterator[Reservation]:
    """The maintenances in the answer of `scontrol --oneliner show reservation`; what is none, or cannot be read, is skipped."""
    for name, rest in _RECORD.findall(text):
        found = dict(word.split("=", 1) for word in rest.split() if "=" in word)
        start_t, end_t = parse_time(found.get("StartTime", "")), parse_time(found.get("EndTime", ""))
        if FLAG not in found.get("Flags", "").split(",") or start_t is None or end_t is None:
            continue
        try:
            hosts = frozenset(expand(found.get("Nodes", "")))
        except ValueError:
            continue
        yield Reservation(name, start_t, end_t, hosts)


def ahead(
    reservations: Collection[Reservation],
    hosts: Sequence[str],
    now: float,
    end_t: float | None,
    own: str = "",
    drained: Collection[int] = (),
) -> list[Ahead]:
    """Those that take nodes of a job before its end, the soonest first.

    A machine may be maintained by one reservation for each rack: what is taken at the same time counts together. One with which it
    is so much that the job cannot go on, and that has begun, is none: Slurm has let the job run on.

    Args:
        hosts: of the job, by number.
        end_t: of the job's time, unix seconds; None: it has no limit, or it is not known.
        own: name of the reservation in which the job itself runs.
        drained: nodes that are left in any case; they count with those of maintenances that are yet to begin.
    """
    concerned = [
        (each, nodes)
        for each in sorted(reservations, key=lambda each: (each.start_t, each.name))
        if (nodes := tuple(number for number, host in enumerate(hosts) if host in each.hosts))
        and each.end_t > now
        and (end_t is None or each.start_t < end_t)
        and each.name != own
    ]
    found: list[Ahead] = []
    left: list[tuple[float, tuple[int, ...]]] = []  # until when, and the nodes
    for start_t, together in groupby(concerned, key=lambda each: each[0].start_t):
        begin = list(together)
        taken = {number for until_t, nodes in left if until_t > start_t for number in nodes}.union(*(nodes for _, nodes in begin))
        whole = not few(len(taken.union(drained if start_t > now else ())), len(hosts))
        if whole and start_t <= now:
            continue
        left += [(each.end_t, nodes) for each, nodes in begin]
        found += [Ahead(each.name, start_t, nodes, whole) for each, nodes in begin]
    return found
