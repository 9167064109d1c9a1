"""Where a roll-back leads, what is invalidated after it, and what the ledger remembers of it."""

from dataclasses import replace

import pytest

from resilient.recovery.faults import Fault
from resilient.recovery.rollback import DurableCheckpoints, InvalidationRule, RollBack, choose, data_of, merged, without_implied

BAD = Fault("g1-1", "not_finite", "BadBatch", (0,), (0,), 16, "loss nan", "", 0.0, since=13)


def done(step: int, skip: tuple[int, int] | None = None, *, since: int = 13, last: int = 16) -> tuple[Fault, RollBack]:
    return replace(BAD, since=since, step=last), RollBack(step, skip)


@pytest.mark.parametrize(
    ("before", "checkpoints", "beginning", "expected"),
    [
        # the newest from before the first bad step
        ([], [5, 10, 12, 13, 15], False, RollBack(12)),
        ([], [5, 10, 15], True, RollBack(10)),
        # each time further back; what was bad after steps that were computed anew is left out
        ([done(12)], [5, 10, 12, 14], False, RollBack(10)),
        ([done(12), done(10)], [5, 10, 12], False, RollBack(5, (13, 16))),
        ([done(0)], [10, 12], True, RollBack(0, (13, 16))),
        # the oldest that there is, where nothing is further back
        ([done(10)], [10, 12], False, RollBack(10, (13, 16))),
        ([done(10)], [10, 12], True, RollBack(0, (13, 16))),
        # other data: nothing is left out
        ([done(2, since=3, last=6)], [1, 2, 10], False, RollBack(1)),
        # data that touches what is left out widens it
        ([done(10, (13, 16), since=13, last=16)], [5, 10], False, RollBack(5, (13, 16))),
        ([done(2, since=9, last=12)], [1, 2], False, RollBack(1, (9, 16))),
        ([done(2, (3, 12), since=9, last=10)], [1, 2], False, RollBack(1, (3, 16))),
        # nothing from before is left
        ([], [13, 20], False, None),
        ([], [13, 20], True, RollBack(0)),
        # a script that keeps its own
        ([], [], False, RollBack(12)),
        ([done(12)], [], False, RollBack(11)),
        ([done(12), done(11)], [], False, RollBack(10, (13, 16))),
    ],
)
def test_a_way_back(before, checkpoints, beginning, expected):
    assert choose(BAD, before, checkpoints, beginning=beginning) == expected


@pytest.mark.parametrize(("since", "step", "data"), [(13, 16, (13, 16)), (None, 16, (16, 16)), (17, 16, (16, 16)), (0, 1, (1, 1))])
def test_the_data_of_a_fault(since, step, data):
    assert data_of(replace(BAD, since=since, step=step)) == data


def test_a_void_covers_what_older_generations_did_beyond_it():
    rule = InvalidationRule(5, 10)
    assert rule.covers(11, 5)
    assert rule.covers(11, 4)
    assert not rule.covers(10, 5)
    assert not rule.covers(11, 6)


def test_of_voids_only_those_are_kept_that_no_other_implies():
    assert without_implied(
        [
            InvalidationRule(3, 20),
            InvalidationRule(5, 10),
            InvalidationRule(4, 12),
            InvalidationRule(5, 10),
            InvalidationRule(7, 15),
        ]
    ) == [InvalidationRule(5, 10), InvalidationRule(7, 15)]


def test_stretches_that_touch_become_one():
    assert merged([(9, 9), (1, 3), (4, 5), (10, 12), (4, 4)]) == [(1, 5), (9, 12)]


def test_the_beginning_may_be_gone_back_to_as_long_as_nothing_was_given_up():
    committed = DurableCheckpoints.found([], keep_last=2)
    for step in (10, 20):
        committed.add(step)
        assert committed.beginning
    committed.roll_back(10)
    assert committed.steps == [10]
    committed.add(15)
    assert committed.beginning
    committed.add(20)
    assert committed.steps == [15, 20]
    assert not committed.beginning


def test_a_job_that_finds_as_many_checkpoints_as_are_kept_cannot_know_of_older_ones():
    assert DurableCheckpoints.found([10], keep_last=2).beginning
    assert not DurableCheckpoints.found([20, 10], keep_last=2).beginning
