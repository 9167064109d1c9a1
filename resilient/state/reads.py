"""Whether a script that goes on reads a DataLoader from the beginning of an epoch again: who does is told once.

Owns the count of the batches that training reads in the first two steps of an attempt. Who leaves out batches that are done reads
more of them before the first step than before the second one.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from resilient.state.position import samplers

log = logging.getLogger(__name__)


class Reads:
    """Of one rank, in an attempt that goes on. It is closed after two steps, or before.

    Args:
        loader: whose position is saved if it has a state.
    """

    def __init__(self, loader: Any) -> None:
        self._saved = id(getattr(loader, "dataset", None)) if hasattr(loader, "state_dict") else None
        self._first: Counter[int] | None = None
        self._now: Counter[int] = Counter()  # batches, by the data set
        self._before = _BaseDataLoaderIter.__next__
        self._counting = self._counted(self._before)
        _BaseDataLoaderIter.__next__ = self._counting  # type: ignore[method-assign, assignment]

    def end_step(self, step: int) -> bool:
        """A step of the loop is over; whether it is the last one to be looked at. Args: step: how many are done."""
        if self._first is None:
            self._first, self._now = self._now, Counter()
            return False
        self.close()
        if any(count <= self._now[data] for data, count in self._first.items()):
            log.warning(
                "step %d has read the first batch of a DataLoader whose position is in no snapshot: it has begun an epoch anew. "
                "Where the snapshot was taken in the middle of one, leave out the batches that are done, or give "
                "resilient.attach a StatefulDataLoader of torchdata as loader",
                step - 1,
            )
        return True

    def close(self) -> None:
        """Count no more."""
        if _BaseDataLoaderIter.__next__ is self._counting:
            _BaseDataLoaderIter.__next__ = self._before  # type: ignore[method-assign]

    def _counted(self, next_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(next_batch)
        def __next__(iterator: Any) -> Any:  # noqa: N807 - it takes the place of one
            batch = next_batch(iterator)
            data = id(iterator._dataset)
            if torch.is_grad_enabled() and data != self._saved and _begins_at_the_front(iterator):
                self._now[data] += 1
            return batch

        return __next__


def _begins_at_the_front(iterator: Any) -> bool:
    """Whether its samplers are torch's, which know no position; one of the script's own may."""
    found = samplers(iterator._index_sampler)
    return bool(found) and all(type(each).__module__.startswith("torch.utils.data") for each in found) and _has_length(iterator)


def _has_length(iterator: Any) -> bool:
    """A stream may know by itself where it was."""
    return not isinstance(iterator._dataset, torch.utils.data.IterableDataset)
