"""A long curve in little memory keeps its extremes, whatever its length, its extent and the way it came."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.report.envelope import Envelope
from resilient.report.heat import Heat

POINTS = st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e6, 1e6)), min_size=1, max_size=400)


def envelope(points: list[tuple[float, float]], chunk: int, most: int) -> Envelope:
    found = Envelope(1.0, most)
    for start in range(0, len(points), chunk):
        x, y = np.array(points[start : start + chunk]).T
        found.add(x, y, np.zeros(len(x), np.int64))
    return found


@settings(deadline=None)
@given(POINTS, st.integers(1, 50), st.integers(2, 20))
def test_extremes_stay_with_their_places_and_stretches_are_bounded(points: list[tuple[float, float]], chunk: int, most: int):
    found = envelope(points, chunk, most)
    kept = [(x, y) for _, x, y in found.points()]
    assert set(kept) <= set(points)
    values = [y for _, y in points]
    assert {min(values), max(values)} <= {y for _, y in kept}
    assert len(found.stretches()) <= most
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@settings(deadline=None)
@given(POINTS)
def test_a_short_curve_is_whole(points: list[tuple[float, float]]):
    alone = {float(number): y for number, (_, y) in enumerate(points)}
    found = envelope(list(alone.items()), 7, 400)
    assert [(x, y) for _, x, y in found.points()] == list(alone.items())


def test_what_is_no_finite_number_is_left_out():
    found = Envelope(1.0)
    found.add(np.array([1.0, 2.0, np.nan]), np.array([np.nan, np.inf, 1.0]), np.zeros(3, np.int64))
    assert found.points() == []
    found.add(np.array([]), np.array([]), np.array([], np.int64))
    assert found.stretches() == []


@pytest.mark.parametrize("far", [1e11, -1e11])
def test_one_point_far_away_costs_no_memory_and_no_time(far: float):
    found = Envelope(2.0**-6)
    found.add(np.append(np.arange(1000.0), far), np.arange(1001.0), np.zeros(1001, np.int64))
    assert {0.0, 1000.0} <= {y for _, _, y in found.points()}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e11)), min_size=1, max_size=200))
def test_troubles_of_hosts_are_counted_once_in_as_many_stretches_as_there_may_be(seen: list[tuple[str, float]]):
    heat = Heat(columns=8)
    for host, t in seen:
        heat.add(host, t, "exit")
    rows = heat.rows()
    assert {host: sum(counts["exit"] for counts in cells.values()) for host, cells in rows.items()} == {
        host: sum(each == host for each, _ in seen) for host in rows
    }
    begins = {t for cells in rows.values() for t in cells}
    assert max(begins) - min(begins) < 8 * heat.width_s
    assert all(any(t <= at < t + heat.width_s for t in rows[host]) for host, at in seen)
