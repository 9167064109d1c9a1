"""Maintenance that is announced: reservations of Slurm that take nodes away from a job which still runs. Pure.

A reservation that lets jobs run on (IGNORE_JOBS) says when a node will be wanted. One or a few nodes of a job are left a while
before; where it is more, they are all to be maintained, and the job is over by then.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
        whole: they are so many that the job is to be over by then; else they are left.
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
    reservations: Collection[Reservation], hosts: Sequence[str], now: float, end_t: float | None, own: str = ""
) -> list[Ahead]:
    """Those that take nodes of a job before its end, the soonest first.

    One that takes so many that the job cannot go on, and has begun, is none: Slurm has let the job run on.

    Args:
        hosts: of the job, by number.
        end_t: of the job's time, unix seconds; None: it has no limit, or it is not known.
        own: name of the reservation in which the job itself runs.
    """
    found = []
    for each in sorted(reservations, key=lambda each: (each.start_t, each.name)):
        nodes = tuple(number for number, host in enumerate(hosts) if host in each.hosts)
        over = each.end_t <= now or (end_t is not None and each.start_t >= end_t)
        if not nodes or over or each.name == own:
            continue
        whole = not few(len(nodes), len(hosts))
        if not (whole and each.start_t <= now):
            found.append(Ahead(each.name, each.start_t, nodes, whole))
    return found
