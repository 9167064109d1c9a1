"""How losses of two campaigns differ."""

import math

from hypothesis import given
from hypothesis import strategies as st

from resilient.lineage.difference import compared, losses_of


def test_the_last_time_that_a_step_was_computed_counts():
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 2.5}, {"note": 1}, {"step": 3, "loss": None}]
    found = losses_of(lines)
    assert math.isnan(found.pop(3)) and found == {1: 3.0, 2: 2.5}


def test_a_step_that_was_left_out_has_no_loss():
    assert losses_of([{"step": 1, "loss": None, "skipped": "rolled_back"}]) == {}


def test_the_same_numbers_are_the_same():
    found = compared({1: 1.0, 2: math.nan}, {2: math.nan, 1: 1.0, 3: 5.0}, 10)
    assert (found.common, found.first, found.last, found.first_different, found.largest) == (2, 1, 2, None, None)


def test_where_they_part_and_where_they_are_farthest_apart_is_said():
    a = {step: float(step) for step in range(1, 1001)}
    b = {**{step: float(step) for step in range(500, 2000)}, 733: 733.5, 800: 799.0}
    found = compared(a, b, 10)
    assert (found.common, found.first_different, found.different, found.largest) == (501, 733, 2, (800, 800.0, 799.0))
    steps = [row[0] for row in found.rows]
    assert len(steps) <= 12 and steps[0] == 500 and steps[-1] == 1000 and 733 in steps


def test_a_number_and_none_are_as_far_apart_as_can_be():
    assert compared({1: 1.0, 2: math.nan}, {1: 9.0, 2: 1.0}, 5).largest[0] == 2  # type: ignore[index]


def test_nothing_in_common_is_nothing():
    assert compared({1: 1.0}, {2: 1.0}, 5).common == 0


@given(st.dictionaries(st.integers(0, 50), st.floats()), st.dictionaries(st.integers(0, 50), st.floats()), st.integers(1, 20))
def test_it_is_symmetric_and_every_row_is_a_common_step(a: dict[int, float], b: dict[int, float], rows: int):
    one, other = compared(a, b, rows), compared(b, a, rows)
    assert (one.common, one.first_different, one.different) == (other.common, other.first_different, other.different)
    assert {row[0] for row in one.rows} <= a.keys() & b.keys() and len(one.rows) <= rows + 2
