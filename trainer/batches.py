"""From samples to batches: which samples a rank reads, and what goes with their tokens."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from resilient.worker import Config
from trainer.data.bounds import Documents
from trainer.data.samples import Samples
from trainer.device import onto
from trainer.engine import IGNORED, Batch
from trainer.parallel import Ranks


class Batches:
    """This rank's part of global batches.

    Micro batch k of data-parallel rank d has samples (k × dp + d) × micro_batch_size and those after it, so that on any layout the
    same samples make up the batch.

    Args:
        end_of_text: the token that ends a document; None where nobody asks.
    """

    def __init__(self, config: Config, ranks: Ranks, device: torch.device, end_of_text: int | None) -> None:
        self._config, self._ranks, self._device = config, ranks, device
        self._end = end_of_text

    def read(self, samples: Samples, first: int, size: int) -> tuple[Batch, Tensor]:
        """Of the global batch of `size` samples from number `first` on: this rank's part, and the part's tokens that count."""
        numbers = np.concatenate(list(self._micro_batches(first, size)))
        window = torch.from_numpy(samples.get(numbers))  # (batch, seq + 1), on the CPU as all that follows from it
        tokens, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        data, model = self._config.data, self._config.model
        positions = documents = None
        if data.mask_end_of_text:
            targets = targets.masked_fill(torch.eq(tokens, self._ended()), IGNORED)
        if data.mask_documents:
            of_token = torch.eq(tokens, self._ended()).cumsum(1).roll(1, 1)
            of_token[:, 0] = 0
            documents = self._moved(Documents.of(of_token))
            if model.position == "learned":
                positions = onto(_within(of_token), self._device)
        if self._ranks.layout.cp > 1:
            positions = torch.arange(model.seq_len, device=self._device).repeat(len(tokens), 1)
        tokens, counted, targets = (onto(x, self._device) for x in (tokens, (targets != IGNORED).sum(), targets))
        return Batch(tokens, targets, positions, documents), counted

    def _moved(self, documents: Documents) -> Documents:
        return Documents(onto(documents.numbers, self._device), onto(documents.starts, self._device), documents.longest)

    def _ended(self) -> int:
        assert self._end is not None
        return self._end

    def _micro_batches(self, first: int, size: int) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        micro, layout = self._config.train.micro_batch_size, self._ranks.layout
        for number in range(size // (micro * layout.dp)):
            start = first + (number * layout.dp + self._ranks.dp_rank) * micro
            yield np.arange(start, start + micro)


def _within(documents: Tensor) -> Tensor:
    """Positions that begin anew with each document, from document numbers (batch, seq)."""
    place = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    starts = torch.zeros_like(place)
    fresh = documents[:, 1:] != documents[:, :-1]
    starts[:, 1:] = torch.where(fresh, place[:, 1:], 0)
    return place - starts.cummax(1).values
