"""Snapshots that take at most a share of the time: how many steps apart they are, and that all ranks agree on it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.tiers.affordable import FIRST, MOST_STEPS, REVIEW_S, Affordable

SHARE = 0.005


class Run:
    """Ranks that take steps together, each with times of its own."""

    def __init__(self, costs_s: list[float], step_s: float) -> None:
        self.ranks = [Affordable(SHARE) for _ in costs_s]
        self.costs_s, self.step_s = costs_s, step_s
        self.now, self.step = 0.0, 0
        self.taken: list[int] = []
        self.settled: list[int] = []
        self.spent_s = 0.0

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.now += self.step_s
            if [rank for rank in self.ranks if rank.asked(self.step, self.now)]:
                proposals = [rank.proposal() for rank in self.ranks]
                for rank in self.ranks:
                    rank.settle(self.step, proposals)
                self.settled.append(self.step)
            due = {rank.due(self.step) for rank in self.ranks}
            assert len(due) == 1, "ranks differ"
            if due.pop():
                self.taken.append(self.step)
                for rank, cost_s in zip(self.ranks, self.costs_s, strict=True):
                    rank.taken(cost_s)
                self.now += max(self.costs_s)
                self.spent_s += max(self.costs_s)


def test_a_snapshot_that_costs_little_is_taken_at_every_step():
    run = Run([0.001], 1.0)
    run.go(1000)
    assert run.taken == list(range(1, 1001))


@pytest.mark.parametrize(("cost_s", "every"), [(0.0049, 1), (0.0051, 2), (0.1, 20), (3.0, 597)])
def test_a_snapshot_that_costs_more_is_taken_so_seldom_that_it_is_within_the_share(cost_s: float, every: int):
    run = Run([cost_s], 1.0)
    run.go(20_000)
    assert run.ranks[0].every == every
    later = [step for step in run.taken if step > FIRST]
    assert {after - before for before, after in itertools.pairwise(later)} == {every}


def test_the_slowest_rank_decides():
    run = Run([0.001, 0.02, 0.001], 1.0)
    run.go(100)
    assert {rank.every for rank in run.ranks} == {4}


def test_ranks_talk_to_each_other_seldom():
    run = Run([0.001, 0.002], 1.0)
    run.go(1000)
    assert len(run.settled) <= run.now / REVIEW_S + 1
    fast = Run([0.001, 0.002], 0.01)
    fast.go(5000)
    assert len(fast.settled) <= fast.now / REVIEW_S + 1


def test_what_becomes_cheap_is_taken_more_often_again():
    run = Run([0.1], 1.0)
    run.go(200)
    assert run.ranks[0].every == 20
    run.costs_s = [0.001]
    run.go(2000)
    assert run.ranks[0].every == 1


def test_where_nothing_was_measured_nothing_changes():
    assert Affordable(SHARE).proposal() == (1, FIRST)


@given(costs=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=4), step_s=st.floats(1e-4, 100.0))
def test_once_measured_they_take_no_more_than_their_share(costs: list[float], step_s: float):
    run = Run(costs, step_s)
    run.go(FIRST)
    run.spent_s, began = 0.0, run.now
    every = max(rank.proposal()[0] for rank in run.ranks)
    run.go(3 * min(every, 2000))
    if every < MOST_STEPS and every <= 2000:
        assert run.spent_s <= SHARE * (run.now - began) * (1 + 1 / 3) + max(costs)
