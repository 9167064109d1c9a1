"""The order in which a blend of datasets is read: which dataset sample number k is of, and which of its samples. Pure.

The weights are turned into whole counts of one period, and in the period each place goes to the dataset that has fallen furthest
behind its weight, so that after any number of samples every dataset is within a sample or so of its share. The period repeats:
place and count say everything, and nothing is stored per sample.
"""

import math
from collections.abc import Sequence

import numpy as np

from trainer.data.errors import DataError
from trainer.data.order import Numbers

LONGEST_PERIOD = 10_000  # weights count to one part in so many


def period_counts(weights: Sequence[float]) -> list[int]:
    """Samples of each dataset in one period: the shortest one that is exact, else one of LONGEST_PERIOD; at least 1 each.

    Raises:
        DataError: a weight is not a positive number.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"a dataset has weight {weight}; a weight is a positive number")
    shares = np.asarray(weights, float) / math.fsum(weights)
    for period in range(len(weights), LONGEST_PERIOD + 1):
        counts = np.rint(shares * period)
        if np.abs(shares * period - counts).max() < 1e-6 and counts.min() >= 1:
            return [int(count) for count in counts]
    return [max(1, int(count)) for count in np.rint(shares * LONGEST_PERIOD)]


class Blend:
    """Where the samples of a weighted list of datasets come from.

    Args:
        weights: one per dataset, in any unit.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = np.asarray(period_counts(weights), np.int64)
        self.period = int(self.counts.sum())
        taken = np.zeros(len(self.counts), np.int64)
        self._which = np.empty(self.period, np.int64)
        self._nth = np.empty(self.period, np.int64)
        for place in range(self.period):
            chosen = int(np.argmax(self.counts * (place + 1) - taken * self.period))
            self._which[place], self._nth[place] = chosen, taken[chosen]
            taken[chosen] += 1

    def locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """The dataset of each sample, and its number among that dataset's samples; both of the shape of `numbers`."""
        rounds, places = np.divmod(numbers, self.period)
        which = self._which[places]
        return which, rounds * self.counts[which] + self._nth[places]
