"""Runs: ascending numbers, as slots are, as stretches without a gap. Pure."""

import itertools
from collections.abc import Sequence


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as [first, count] of each stretch without a gap."""
    if isinstance(numbers, range) and numbers.step == 1:
        return [[numbers.start, len(numbers)]] if numbers else []
    found = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        stretch = [number for _, number in group]
        found.append([stretch[0], len(stretch)])
    return found
