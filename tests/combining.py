"""Few of many cases, in which any values that occur together in one of all still do: combinatorial (t-wise) testing.

Cohen et al., "The AETG system: an approach to testing based on combinatorial design", IEEE Transactions on Software
Engineering 23(7), 1997: the case that has most combinations which no earlier one had comes next.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case")
Combination = tuple[tuple[int, Hashable], ...]  # dimensions, each with a value


def combined(values: Sequence[Hashable], together: int) -> frozenset[Combination]:
    """All combinations of so many of one case's values, of which there is one for each dimension."""
    return frozenset(combinations(enumerate(values), together))


def meeting(cases: Sequence[Case], values: Callable[[Case], Sequence[Hashable]], together: int = 3) -> list[Case]:
    """Of `cases`, in their order, as few as the greedy way finds that have every combination of `together` values."""
    left = {number: set(combined(values(case), together)) for number, case in enumerate(cases)}
    kept: list[int] = []
    while left:
        best = max(left, key=lambda number: len(left[number]))  # the first of those that have equally many
        new = left.pop(best)
        if not new:
            break
        kept.append(best)
        for others in left.values():
            others -= new
    return [cases[number] for number in sorted(kept)]
