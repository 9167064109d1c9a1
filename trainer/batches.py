"""From samples to batches: which samples a rank reads, and what goes with their tokens."""

import numpy as np
import torch
from torch import Tensor

from resilient.worker import Config, dealing
from trainer.data.bounds import Documents
from trainer.data.order import Numbers
from trainer.data.samples import Samples, Windows
from trainer.device import locked
from trainer.engine import Batch
from trainer.loss import IGNORED
from trainer.parallel import Ranks


class Batches:
    """This rank's part of global batches.

    Micro batch k of data-parallel rank d has samples (k × dp + d) × micro_batch_size and those after it, so that on any layout the
    same samples make up the batch. Behind them come the empty micro batches that the rank's replica must take part with
    (`resilient.config.dealing`); none of their tokens has a target.

    Args:
        end_of_text: the token that ends a document; None where nobody asks.
    """

    def __init__(self, config: Config, ranks: Ranks, device: torch.device, end_of_text: int | None) -> None:
        self._config, self._ranks, self._device = config, ranks, device
        self._end = end_of_text
        self._dealing = dealing(config, ranks.layout.dp)

    def read(self, samples: Samples, first: int, size: int) -> tuple[Batch, Tensor]:
        """Of the global batch of `size` samples from number `first` on: this rank's part, and the part's tokens that count.

        Both on the CPU, page-locked where the rank computes on a GPU. Any thread may ask.
        """
        own, empty = self._dealt(first, size)
        window = torch.from_numpy(np.concatenate([samples.get(own), self._filled(empty)]))  # (batch, seq + 1), on the CPU as all
        batch = unfolded(window, self._config, self._end)  # that follows from it
        batch.targets[len(own) :] = IGNORED
        counted = (batch.targets != IGNORED).sum()
        if self._ranks.layout.cp > 1:
            batch.positions = torch.arange(self._config.model.seq_len).repeat(len(window), 1)
        return batch.locked(self._device), locked(counted, self._device)

    def _dealt(self, first: int, size: int) -> tuple[Numbers, int]:
        """This rank's samples of the global batch, and how many rows of empty micro batches follow them."""
        micro, rank = self._config.train.micro_batch_size, self._ranks.dp_rank
        own = np.array(self._dealing.own(size // micro, rank), np.int64)  # micro batches
        passes = self._dealing.passes(size // micro, rank)
        numbers = (first + own[:, None] * micro + np.arange(micro)).flatten()
        return numbers, (passes - len(own)) * micro

    def _filled(self, rows: int) -> Windows:
        """Samples of no account, each of one token that ends no document."""
        return np.full((rows, self._config.model.seq_len + 1), int(self._end == 0), np.int64)


def unfolded(window: Tensor, config: Config, end_of_text: int | None) -> Batch:
    """Tokens and targets of samples (batch, seq + 1), and what the config wants beside them; all of it on the CPU.

    Args:
        end_of_text: the token that ends a document; None where nobody asks.
    """
    tokens, targets = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    data, positions, documents = config.data, None, None
    if data.mask_end_of_text:
        assert end_of_text is not None
        targets = targets.masked_fill(torch.eq(tokens, end_of_text), IGNORED)
    if data.mask_documents:
        assert end_of_text is not None
        of_token = torch.eq(tokens, end_of_text).cumsum(1).roll(1, 1)
        of_token[:, 0] = 0
        documents = Documents.of(of_token)
        if config.model.position == "learned":
            positions = _within(of_token)
    return Batch(tokens, targets, positions, documents)


def _within(documents: Tensor) -> Tensor:
    """Positions that begin anew with each document, from document numbers (batch, seq)."""
    place = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    starts = torch.zeros_like(place)
    fresh = documents[:, 1:] != documents[:, :-1]
    starts[:, 1:] = torch.where(fresh, place[:, 1:], 0)
    return place - starts.cummax(1).values
