"""Choice of cases: nothing that occurs together is left out, and no case is kept that adds nothing."""

from itertools import product

import pytest
from combining import combined, meeting

Case = tuple[int, ...]


def same(case: Case) -> Case:
    return case


def all_of(cases: list[Case], together: int) -> frozenset[object]:
    return frozenset().union(*(combined(case, together) for case in cases))


@pytest.mark.parametrize("together", [2, 3])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 4, 2), (4, 4, 4, 4), (2,) * 8], ids=str)
def test_values_still_meet_in_fewer_cases(sizes: Case, together: int):
    cases: list[Case] = list(product(*map(range, sizes)))
    kept = meeting(cases, same, together)
    assert all_of(kept, together) == all_of(cases, together)
    assert len(kept) < len(cases) or len(sizes) == together
    assert kept == sorted(kept)


def test_as_many_values_as_there_are_dimensions_are_all_cases():
    cases: list[Case] = list(product((1, 2), (1, 2, 3)))
    assert meeting(cases, same, 2) == cases


def test_what_does_not_go_together_is_not_asked_for():
    cases = [case for case in product((1, 2), (1, 2), (1, 2, 3)) if case[0] + case[1] < 4]
    kept = meeting(cases, same, 2)
    assert set(kept) <= set(cases)
    assert all_of(kept, 2) == all_of(cases, 2)


def test_a_case_that_adds_nothing_is_left_out():
    assert meeting([(1, 1), (1, 1), (2, 1)], same, 2) == [(1, 1), (2, 1)]
