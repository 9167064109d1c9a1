"""Samples: windows of seq_len + 1 tokens, in an order that is a pure function of (seed, epoch, index).

The tokens of a split lie one after the other, and window i of it starts at token i × seq_len. Sample number k is, in epoch k // n,
the window that the permutation of (seed, epoch) gives for k mod n; of a blend, `blend` says which dataset's sample it is. So the
state of a loader is one number, the samples consumed, on any layout.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.data.blend import Blend
from trainer.data.errors import DataError
from trainer.data.indexed import IndexedDataset
from trainer.data.order import Numbers, permute
from trainer.data.split import Shares, split_tokens

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

Windows = np.ndarray[Any, np.dtype[np.int64]]


class _Windows:
    """The windows of one split of one dataset."""

    def __init__(self, prefix: Path, shares: Shares, which: Split, seq_len: int, vocab_size: int | None) -> None:
        data = IndexedDataset(prefix)
        bounds = split_tokens(shares, seq_len + 1, len(data), data.boundary)
        if bounds is None:
            wanted = sum(share > 0 for share in shares)
            raise DataError(
                f"{prefix} has {len(data.tokens):,} tokens, and one sample of seq_len {seq_len} for each of {wanted} splits needs "
                f"{wanted * (seq_len + 1):,}; give more text, fewer splits, or a smaller seq_len"
            )
        number = SPLITS.index(which)
        self.prefix, self.seq_len, self.vocab_size = prefix, seq_len, vocab_size
        self.first, last = bounds[number], bounds[number + 1]
        self.tokens = data.tokens[self.first : last]
        self.count = (last - self.first - 1) // seq_len

    def get(self, numbers: Numbers, seed: int) -> Windows:
        epochs, indices = np.divmod(numbers, self.count)
        windows = np.empty(len(numbers), np.int64)
        for epoch in set(epochs.tolist()):  # np.unique imports numpy.ma, 30 ms of a rank's first batch
            chosen = epochs == epoch
            windows[chosen] = permute(indices[chosen], self.count, seed, epoch)
        result = np.empty((len(numbers), self.seq_len + 1), np.int64)
        for row, window in enumerate(windows):
            start = int(window) * self.seq_len
            result[row] = self.tokens[start : start + self.seq_len + 1]
        self._check_vocabulary(result, windows)
        return result

    def _check_vocabulary(self, result: Windows, windows: Numbers) -> None:
        if self.vocab_size is None or not result.size or (result.min() >= 0 and result.max() < self.vocab_size):
            return
        row, column = np.argwhere((result < 0) | (result >= self.vocab_size))[0]
        place = self.first + int(windows[row]) * self.seq_len + int(column)
        raise DataError(
            f"{self.prefix}.bin has token {result[row, column]} at place {place:,}, and the vocabulary has only "
            f"{self.vocab_size:,}: the dataset was made with another tokenizer; name that one, or build it again"
        )


class Samples:
    """The samples of a split, of one dataset or a weighted blend. `len` is one epoch; of a blend, the sum of its datasets'."""

    def __init__(self, parts: Sequence[tuple[_Windows, float]], seed: int) -> None:
        self._parts = [windows for windows, _ in parts]
        self._seed = seed
        self._blend = Blend([weight for _, weight in parts])

    def __len__(self) -> int:
        return sum(part.count for part in self._parts)

    def get(self, numbers: Numbers) -> Windows:
        """Samples by number, (len(numbers), seq_len + 1). Any number from 0 on is good: epochs go on for ever.

        Raises:
            ValueError: a number is negative.
            DataError: a token is not of the vocabulary.
        """
        numbers = np.asarray(numbers, np.int64)
        if numbers.size and numbers.min() < 0:
            raise ValueError(f"sample {numbers.min()}: samples are numbered from 0 on")
        which, inner = self._blend.locate(numbers)
        result = np.empty((len(numbers), self._parts[0].seq_len + 1), np.int64)
        for number, part in enumerate(self._parts):
            chosen = which == number
            if chosen.any():
                result[chosen] = part.get(inner[chosen], self._seed + number)
        return result

    def dataset_of(self, numbers: Numbers) -> Numbers:
        """Which dataset each sample is of, by its place in the list."""
        return self._blend.locate(np.asarray(numbers, np.int64))[0]


def open_split(
    prefixes: Sequence[tuple[Path, float]],
    shares: Shares,
    which: Split,
    seq_len: int,
    seed: int,
    *,
    vocab_size: int | None = None,
) -> Samples:
    """Open a split.

    Args:
        prefixes: datasets with their weights.
        shares: of the tokens, for training, validation and test.
        seq_len: tokens that a sample predicts.
        vocab_size: a token from here on is an error of the sample that holds it; None: not looked at.

    Raises:
        DataError: a dataset is not good, has not a sample for every split that has a share, or this split has none.
    """
    if not prefixes:
        raise DataError("no dataset is named; give data.path, or data.text to make one")
    if min(shares) < 0 or not shares[SPLITS.index(which)]:
        raise DataError(f"split {list(shares)} leaves nothing for {which}; give it a share above 0")
    return Samples([(_Windows(Path(prefix), shares, which, seq_len, vocab_size), weight) for prefix, weight in prefixes], seed)
