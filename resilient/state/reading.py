"""What a checkpoint of an attached script is read into: the tensors where they are, and rows of the ranks that wrote it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import checkpoint
from resilient.state import documents, fingerprint
from resilient.state.arrays import Arrays


@dataclass(frozen=True)
class Reading:
    """Of one rank.

    Attributes:
        rows: of the documents: all of them, or this rank's; (ranks, bytes).
        fingerprints: of the same ranks, each of which has written a part of what all have; (ranks,), or empty.
        row: the first of them.
        count: of the ranks that wrote.
        groups: options of the optimizers.
    """

    found: Arrays
    rows: torch.Tensor
    fingerprints: torch.Tensor
    row: int
    count: int
    groups: Sequence[Any]

    def local_shards(self) -> list[checkpoint.LocalShard]:
        size = self.rows.shape[1]
        row = checkpoint.LocalShard(documents.ARRAY, (self.count, size), (self.row, 0), self.rows, (1, size))
        told = [fingerprint.shard(self.fingerprints.unsqueeze(1), self.row, self.count)] if len(self.fingerprints) else []
        return [*self.found.local_shards(), row, *told]
