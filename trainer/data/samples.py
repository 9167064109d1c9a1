"""Samples: windows of seq_len + 1 tokens, in an order that is a pure function of (seed, epoch, index).

A split is a range of documents; its tokens lie one after the other, and sample i of it is the window that starts at token
i × seq_len. Sample number k of training is, in epoch k // n, the window that the permutation of (seed, epoch) gives for k mod n. So
the state of a loader is one number, on any layout.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.data.errors import DataError
from trainer.data.indexed import IndexedDataset
from trainer.data.order import PERIOD, Numbers, blend_period, permute

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

Windows = np.ndarray[Any, np.dtype[np.int64]]


def split_boundaries(documents: int, shares: tuple[int, int, int]) -> list[int]:
    """Where the three splits begin and end, in documents. A share above 0 gets a document as long as there are enough."""
    total = sum(shares)
    bounds = [0]
    for number in range(3):
        bounds.append(round(documents * sum(shares[: number + 1]) / total))
    wanted = [share > 0 for share in shares]
    if documents >= sum(wanted):
        # From the right, then from the left: a split that came out empty takes a document from its neighbour.
        for number in (2, 1):
            if wanted[number] and bounds[number] >= bounds[number + 1]:
                bounds[number] = bounds[number + 1] - 1
        for number in (0, 1):
            if wanted[number] and bounds[number + 1] <= bounds[number]:
                bounds[number + 1] = bounds[number] + 1
    return bounds


class _Windows:
    """The windows of one split of one dataset."""

    def __init__(self, prefix: Path, shares: tuple[int, int, int], which: Split, seq_len: int) -> None:
        data = IndexedDataset(prefix)
        bounds = split_boundaries(len(data), shares)
        number = SPLITS.index(which)
        first, last = (data.boundary(document) for document in bounds[number : number + 2])
        self.tokens = data.tokens[first:last]
        self.seq_len = seq_len
        self.count = max(0, (last - first - 1) // seq_len)
        if self.count == 0:
            raise DataError(
                f"{prefix} has {last - first} tokens in {bounds[number + 1] - bounds[number]} documents for the {which} "
                f"split, and one sample needs {seq_len + 1}; give more data, another split, or a smaller seq_len"
            )

    def get(self, numbers: Numbers, seed: int) -> Windows:
        epochs, indices = np.divmod(numbers, self.count)
        windows = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permute(indices[chosen], self.count, seed, int(epoch))
        result = np.empty((len(numbers), self.seq_len + 1), np.int64)
        for row, window in enumerate(windows):
            start = int(window) * self.seq_len
            result[row] = self.tokens[start : start + self.seq_len + 1]
        return result


class Samples:
    """The samples of a split, of one dataset or a weighted blend. `len` is one epoch of the whole."""

    def __init__(self, parts: Sequence[tuple[_Windows, float]], seed: int) -> None:
        self._parts = [windows for windows, _ in parts]
        self._seed = seed
        if len(parts) > 1:
            self._period = blend_period([weight for _, weight in parts])
            # How many samples of each dataset come before each place of the period.
            taken = np.cumsum(self._period[:, None] == np.arange(len(parts)), axis=0)
            self._before = np.concatenate((np.zeros((1, len(parts)), np.int64), taken))

    def __len__(self) -> int:
        return sum(part.count for part in self._parts)

    def get(self, numbers: Numbers) -> Windows:
        """Samples by number, (len(numbers), seq_len + 1). Any number from 0 on is good: epochs go on for ever."""
        if len(self._parts) == 1:
            return self._parts[0].get(numbers, self._seed)
        rounds, places = np.divmod(numbers, PERIOD)
        which = self._period[places]
        inner = rounds * self._before[PERIOD, which] + self._before[places, which]
        result = np.empty((len(numbers), self._parts[0].seq_len + 1), np.int64)
        for number, part in enumerate(self._parts):
            chosen = which == number
            if chosen.any():
                result[chosen] = part.get(inner[chosen], self._seed + number)
        return result


def open_split(
    prefixes: Sequence[tuple[Path, float]], shares: tuple[int, int, int], which: Split, seq_len: int, seed: int
) -> Samples:
    """Open a split.

    Args:
        prefixes: datasets with their weights.
        shares: of the documents, for training, validation and test.
        seq_len: tokens that a sample predicts.

    Raises:
        DataError: a dataset is not good, or has not a single sample for this split.
    """
    return Samples([(_Windows(prefix, shares, which, seq_len), weight) for prefix, weight in prefixes], seed)
