"""When a tier is due, as a function of steps, time and what snapshots cost."""

import math
from collections.abc import Iterable

import pytest

from checkpoint.tiers.cadence import LONGEST_WAIT_S, PRIOR_S, Clock, Every, mean_time_between_failures, young_daly


def test_every_so_many_steps_means_multiples() -> None:
    clock = Clock({"ram": Every(1), "disk": Every(5)}, 1e5, 0.0)
    assert [clock.due(step, 0.0) for step in (4, 5, 6)] == [{"ram"}, {"ram", "disk"}, {"ram"}]


@pytest.mark.parametrize(
    ("asked", "due"),
    [
        (range(1, 1000, 2), [101, 201, 301, 401, 501, 601, 701, 801, 901]),
        (range(1, 301), [100, 200, 300]),
        (range(201, 402, 2), [301, 401]),
        ([200, 202], [200]),
        ([150, 250, 350], [250, 350]),
        ([150, 250, 120, 199, 201, 250], [250, 201]),
        ([99, 100, 100, 101], [100, 100]),
    ],
    ids=["by two", "by one", "after a restart", "first asked", "over a multiple", "back", "again"],
)
def test_every_so_many_steps_means_the_first_step_asked_about_from_each_multiple_on(asked: Iterable[int], due: list[int]) -> None:
    clock = Clock({"disk": Every(100)}, 1e5, 0.0)
    assert [step for step in asked if clock.due(step, 0.0)] == due


def test_every_so_many_seconds_means_the_first_step_after_them() -> None:
    clock = Clock({"disk": Every(None, 10.0)}, 1e5, 100.0)
    assert not clock.due(1, 109.0)
    assert clock.due(2, 110.0) == {"disk"}
    clock.taken(frozenset(["disk"]), 0.1, 110.0)
    assert not clock.due(3, 119.0)
    assert clock.due(4, 121.0)


def test_a_tier_without_a_cadence_is_never_due_by_itself() -> None:
    assert not Clock({"memory": Every()}, 1e5, 0.0).due(10, 1e6)


def test_a_snapshot_waits_for_a_buffer_as_long_as_is_little_beside_the_time_since_the_last_one() -> None:
    clock = Clock({"ram": Every(1), "disk": Every(500)}, 1e5, 0.0)
    clock.taken(frozenset(["ram"]), 0.1, 999.0)
    assert clock.patience_s(frozenset(["ram"]), 1000.0) == pytest.approx(0.002)
    assert clock.patience_s(frozenset(["ram", "disk"]), 1000.0) == pytest.approx(2.0)
    assert clock.patience_s(frozenset(["ram", "disk"]), 1e6) == LONGEST_WAIT_S
    assert clock.patience_s(frozenset(), 1e6) == 0.0


def test_auto_takes_one_at_once_and_then_keeps_to_the_optimum() -> None:
    clock = Clock({"disk": Every("auto")}, 2e4, 0.0)
    assert clock.due(1, 0.5) == {"disk"}
    clock.taken(frozenset(["disk"]), 1.0, 1.0)
    interval = young_daly(1.0, 2e4)
    assert not clock.due(2, 1.0 + 0.9 * interval)
    assert clock.due(3, 1.0 + 1.1 * interval)


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [(1.0, 3600.0), (5.0, 86400.0), (0.01, 600.0)])
def test_the_interval_loses_least(stall_s: float, mtbf_s: float) -> None:
    """Against the exact expectation of the time lost, with failures that come as a Poisson process."""

    def lost(interval: float) -> float:
        segment = interval + stall_s
        return mtbf_s * (math.exp(segment / mtbf_s) - 1) / interval  # Daly (2006), without restart costs

    best = young_daly(stall_s, mtbf_s)
    assert lost(best) <= min(lost(best * factor) for factor in (0.5, 0.8, 1.25, 2.0))


def test_snapshots_that_take_longer_than_failures_are_apart_are_taken_once_a_failure() -> None:
    assert young_daly(100.0, 20.0) == 20.0


def test_failures_are_expected_even_if_none_was_seen() -> None:
    assert mean_time_between_failures(0, 0.0) == PRIOR_S
    assert mean_time_between_failures(9, 9 * PRIOR_S) == PRIOR_S
    assert mean_time_between_failures(50, 3600.0) < 600.0
