"""Maintenances that take nodes of a job; the text is that of Slurm 22.05."""

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime

import pytest

from resilient.slurm.maintenance import LEAVE_S, Reservation, ahead, parse

REST = (
    "Features=(null) PartitionName=(null) Flags={flags} TRES=cpu=2 Users=root Groups=(null) Accounts=(null) Licenses=(null) "
    "State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null)\n"
)
TOLD = (
    (
        "ReservationName=maint1 StartTime=2026-11-24T22:58:22 EndTime=2026-11-25T00:58:22 Duration=02:00:00 Nodes=n2 NodeCnt=1 "
        "CoreCnt=2 " + REST.format(flags="MAINT,IGNORE_JOBS,SPEC_NODES")
    )
    + (
        "ReservationName=other StartTime=2026-11-24T23:28:23 EndTime=2027-11-24T23:28:23 Duration=365-00:00:00 Nodes=n1 NodeCnt=1 "
        "CoreCnt=2 " + REST.format(flags="IGNORE_JOBS,SPEC_NODES")
    )
    + (
        "ReservationName=all StartTime=2026-12-24T08:00:00 EndTime=2026-12-26T08:00:00 Duration=2-00:00:00 Nodes=n[1,3] NodeCnt=2 "
        "CoreCnt=4 " + REST.format(flags="MAINT,FLEX,IGNORE_JOBS,SPEC_NODES,ALL_NODES")
    )
)


def t(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def test_maintenances_are_told_from_other_reservations():
    assert list(parse(TOLD)) == [
        Reservation("maint1", t("2026-11-24T22:58:22"), t("2026-11-25T00:58:22"), frozenset({"n2"})),
        Reservation("all", t("2026-12-24T08:00:00"), t("2026-12-26T08:00:00"), frozenset({"n1", "n3"})),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "No reservations in the system\n",
        "",
        TOLD.replace("StartTime=2", "StartTime=x"),
        TOLD.replace("Nodes=n", "Nodes=n]["),
        TOLD.replace("MAINT", "MAINTENANCE"),
    ],
)
def test_what_is_no_maintenance_is_skipped(text: str):
    assert not list(parse(text))


HOSTS = [f"n{number}" for number in range(8)]
NOW = 10_000.0


def taken(*hosts: int, start_s: float = 5000.0, end_s: float = 9000.0, name: str = "m") -> Reservation:
    return Reservation(name, NOW + start_s, NOW + end_s, frozenset(HOSTS[host] for host in hosts) | {"elsewhere"})


@pytest.mark.parametrize(
    ("reservation", "left_s", "found"),
    [
        (taken(2), None, ((2,), False)),
        (taken(2), 6000.0, ((2,), False)),
        (taken(2), 4000.0, None),  # the job is over by then
        (taken(2, 5), None, ((2, 5), False)),
        (taken(2, 5, 7), None, ((2, 5, 7), True)),
        (taken(*range(8)), 6000.0, (tuple(range(8)), True)),
        (taken(2, start_s=-100.0), 6000.0, ((2,), False)),
        (taken(*range(8), start_s=-100.0), 6000.0, None),  # it has begun, and the job runs on
        (taken(2, start_s=-200.0, end_s=-100.0), None, None),
        (taken(2, name="own"), None, None),
        (taken(), None, None),
    ],
)
def test_a_few_nodes_are_left_and_a_job_that_loses_more_is_over_by_then(reservation, left_s, found):
    end_t = NOW + left_s if left_s is not None else None
    maintenances = ahead([reservation], HOSTS, NOW, end_t, own="own")
    assert [(each.nodes, each.whole) for each in maintenances] == ([found] if found is not None else [])


def test_nodes_are_left_shortly_before_the_maintenance_and_the_soonest_comes_first():
    first, second = ahead([taken(3, start_s=LEAVE_S + 1), taken(1, start_s=LEAVE_S - 1)], HOSTS, NOW, None)
    assert (first.nodes, first.due(NOW), second.nodes, second.due(NOW)) == ((1,), True, (3,), False)
    (whole,) = ahead([taken(*range(8), start_s=1.0)], HOSTS, NOW, None)
    assert not whole.due(NOW)


def found(*reservations: Reservation, drained: Collection[int] = ()) -> list[tuple[str, bool]]:
    return [(each.name, each.whole) for each in ahead(reservations, HOSTS, NOW, None, drained=drained)]


def test_maintenances_that_take_nodes_at_the_same_time_are_judged_together():
    racks = [taken(2 * rack, 2 * rack + 1, name=f"r{rack}") for rack in range(4)]
    assert found(*racks) == [(f"r{rack}", True) for rack in range(4)]
    assert found(*(replace(each, start_t=NOW - 1) for each in racks)) == []  # they have begun, and the job runs on
    assert found(racks[0], taken(0, 1, 2, name="r")) == [("r", True), ("r0", True)]
    assert found(racks[0], taken(1, 0, name="r")) == [("r", False), ("r0", False)]  # the same nodes
    later = taken(4, start_s=6000.0, name="later")
    assert found(racks[0], later) == [("r0", False), ("later", True)]
    assert found(replace(racks[0], end_t=later.start_t), later) == [("r0", False), ("later", False)]  # one after the other
    assert found(replace(racks[0], start_t=NOW - 1), later) == [("r0", False), ("later", True)]
    begun = taken(0, 1, 2, start_s=-100.0, name="begun")
    assert found(begun, later) == [("later", False)]


def test_nodes_that_are_left_since_they_are_drained_count_with_those_that_a_maintenance_takes():
    assert found(taken(2, 5), drained=[5]) == [("m", False)]
    assert found(taken(2, 5), drained=[6]) == [("m", True)]
    assert found(taken(2, 5, start_s=-100.0), drained=[6]) == [("m", False)]  # its nodes are left already
