"""What to do about a node that is gone, where no spare stands in for it: situations, and that no other choice is better."""

from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.recovery.without_spare import Figures, decide, measured

HOUR = 3600.0
NEVER: tuple[float, ...] = ()

# nodes, fewer, rate, returns_s, restart_s, left_s, limit_s, queues_s, what is best
TABLE: list[tuple[int, int, float, tuple[float, ...], float, float | None, float | None, tuple[float, ...], str]] = [
    (4, 3, 0.75, NEVER, 15, None, None, (), "shrink"),  # nothing is known: three of four are better than none
    (4, 2, 0.5, NEVER, 15, None, None, (), "shrink"),
    (128, 127, 0.99, NEVER, 60, 24 * HOUR, 24 * HOUR, (), "shrink"),
    (128, 127, 0.99, (600,), 60, 24 * HOUR, 24 * HOUR, (), "shrink"),  # a hundredth of ten minutes
    (128, 127, 0.99, (600,), 60, 24 * HOUR, 24 * HOUR, (300,), "shrink"),
    (2, 1, 0.5, (600,), 15, None, None, (), "shrink"),  # half of ten minutes, and a restart
    (2, 1, 0.5, (60,), 120, None, None, (), "wait"),  # two restarts cost more than it takes to come back
    (2, 1, 0.5, (100,), 15, None, None, (), "shrink"),
    (2, 1, 0.1, (100,), 15, None, None, (), "shrink"),  # a tenth is better than nothing
    (2, 1, 0.1, (600, 600, 600), 60, None, None, (), "shrink"),
    (2, 1, 0.05, (50, 50, 50), 60, None, None, (), "wait"),
    (4, 3, 0.5, (40,), 60, None, None, (), "wait"),
    (4, 3, 0.75, (120,), 60, None, None, (), "shrink"),
    (4, 3, 0.75, (50,), 300, None, None, (), "wait"),
    (4, 3, 0.75, (50, 80000), 300, None, None, (), "shrink"),  # one of two has not come back for a day
    (4, 3, 0.75, (50, 60, 70), 300, None, None, (), "wait"),
    (4, 3, 0.75, (50,), 300, 100, HOUR, (), "shrink"),  # nothing is to be had in what is left; fewer is the simpler
    (4, 3, 0.75, (50,), 60, 300, HOUR, (), "wait"),
    (4, 1, 0.25, NEVER, 60, 10 * HOUR, 24 * HOUR, (HOUR,), "next_job"),  # a quarter of ten hours, or an hour in the queue
    (4, 1, 0.25, NEVER, 60, 10 * HOUR, 24 * HOUR, (30 * HOUR,), "shrink"),
    (4, 1, 0.25, NEVER, 60, 10 * HOUR, 24 * HOUR, (), "shrink"),  # there is no chain
    (4, 1, 0.25, NEVER, 60, None, None, (HOUR,), "shrink"),  # a job without a limit is followed by none
    (4, 1, 0.25, (300,), 60, 10 * HOUR, 24 * HOUR, (HOUR,), "shrink"),
    (4, 1, 0.25, (9 * HOUR,), 60, 10 * HOUR, 24 * HOUR, (600,), "next_job"),
    (4, 3, 0.75, NEVER, 60, 23 * HOUR, 24 * HOUR, (600, 700, 800), "next_job"),
    (4, 3, 0.75, NEVER, 60, 600, 24 * HOUR, (600, 700, 800), "next_job"),  # the queue is waited for anyway
    (4, 3, 0.75, NEVER, 60, 200, 24 * HOUR, (20 * HOUR,), "shrink"),
    (128, 127, 0.99, NEVER, 60, 12 * HOUR, 24 * HOUR, (600,), "next_job"),  # 432 s, or half of ten minutes and a restart
    (128, 127, 0.99, NEVER, 60, 12 * HOUR, 24 * HOUR, (2 * HOUR,), "shrink"),
    (16, 8, 0.5, (60,), 90, 6 * HOUR, 24 * HOUR, (10 * HOUR,), "wait"),
    (3, 2, 1.0, (600,), 15, None, None, (), "shrink"),  # fewer are as fast: the micro batches are divided no worse
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_what_is_best(row):
    *known, best = row
    assert decide("auto", Figures(*known)).choice == best


def simulated_s(choice: str, figures: Figures, return_s: float) -> float:
    """The full training that is not done in the rest of the job, stretch by stretch."""
    left_s = 86400.0 if figures.left_s is None else figures.left_s
    if choice == "next_job":
        assert figures.left_s is not None and figures.limit_s
        return figures.restart_s + median(figures.queues_s) * min(1.0, left_s / figures.limit_s)
    endless = 10 * left_s + 1
    stretches = [(return_s + figures.restart_s, 0.0), (endless, 1.0)]
    if choice == "shrink":
        fewer_s = max(0.0, return_s - figures.restart_s)
        stretches = [(figures.restart_s, 0.0), (fewer_s, figures.rate), (figures.restart_s, 0.0), (endless, 1.0)]
    done = 0.0
    for seconds, rate in stretches:
        spent_s = min(seconds, left_s)
        left_s -= spent_s
        done += rate * spent_s
    return (86400.0 if figures.left_s is None else figures.left_s) - done


seconds = st.floats(1.0, 1e5)


@given(
    rate=st.floats(0.01, 1.0),
    returns_s=st.lists(seconds, max_size=8),
    restart_s=st.floats(1.0, 1e3),
    times=st.none() | st.tuples(st.floats(0.0, 1.0), seconds),
    queues_s=st.lists(seconds, max_size=5),
)
def test_no_fixed_choice_is_better_than_auto(rate, returns_s, restart_s, times, queues_s):
    limit_s = times[1] if times is not None else None
    left_s = times[0] * times[1] if times is not None else None
    figures = Figures(4, 3, rate, returns_s, restart_s, left_s, limit_s, queues_s)
    never_s = 86400.0 if left_s is None else left_s

    def cost_s(choice: str) -> float:
        return fmean(simulated_s(choice, figures, each) for each in returns_s or [never_s])

    choices = ["shrink", "wait", *(["next_job"] if queues_s and left_s is not None else [])]
    auto = decide("auto", figures).choice
    assert auto in choices
    assert cost_s(auto) <= 1.05 * min(map(cost_s, choices)) + 1e-6


def test_the_figures_are_in_the_reason():
    told = decide("auto", Figures(4, 1, 0.25, (300.0, 500.0), 60.0, 36000.0, 86400.0, (3600.0,))).reason
    assert told == (
        "1 node goes on: estimated loss of training 375 s with 1 of 4 nodes, 460 s by waiting, 1560 s by the next job "
        "(25% of the throughput, back after 400 s, 60 s to start again, 36000 s left, 3600 s in the queue)"
    )


@pytest.mark.parametrize("asked", ["shrink", "wait", "next_job"])
def test_what_is_asked_for_is_done(asked):
    found = decide(asked, Figures(4, 3, 0.75))
    assert found.choice == asked and f"resilience.without_spare: {asked}" in found.reason


def line(t: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": event, **fields}


def test_a_node_that_is_excluded_and_was_never_gone_tells_nothing_of_how_soon_nodes_come_back():
    lost = line(10.0, "fault", kind="node_lost", nodes=[2])
    ill = [line(11.0, "fault", kind="node_lost", nodes=[1]), line(11.0, "action", name="exclude_node")]
    back = line(40.0, "generation_started", members=[0, 1, 2])
    assert measured([line(0.0, "run_started"), lost, *ill, back]).returns_s == (30.0,)


def test_the_ledger_tells_what_nodes_jobs_and_restarts_have_taken():
    found = measured(
        [
            line(0.0, "run_started"),
            line(10.0, "fault", kind="node_lost", nodes=[2]),
            line(12.0, "fault", kind="exit", nodes=[1]),
            line(40.0, "generation_started", members=[0, 1]),
            line(41.0, "recovered", downtime_s=31.0),
            line(70.0, "generation_started", members=[0, 1, 2]),
            line(90.0, "fault", kind="node_lost", nodes=[1]),
            line(91.0, "generation_started", members=None),  # as a disk may have it
            line(92.0, "generation_started", members=[{}, []]),
            line(100.0, "run_finished"),
            line(400.0, "run_started"),
            line(410.0, "generation_started", members=[0, 1, 2]),  # other nodes, maybe
        ]
    )
    assert (found.returns_s, found.restarts_s, found.queues_s) == ((60.0,), (31.0,), (300.0,))
