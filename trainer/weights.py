"""Weights at the start: a pure function of the seed and a parameter's name, whatever part of it lies on this rank.

A matrix is drawn in bands of rows, each from a generator of its own, so that a rank draws little more than what it keeps.
"""

import hashlib

import torch
from torch import Tensor

from checkpoint import local_shard_of
from trainer.model import GPT
from trainer.shape import GPTShape, Weight

BAND = 256  # rows


def initialize(model: GPT, seed: int) -> None:
    """Set every parameter of a model, or of a stage of one, spread or not. Norms are 1, biases 0, the rest is normal."""
    known = {weight.name: weight for weight in model.shape.weights()}
    for local_name, parameter in model.named_parameters():
        weight = known[model.global_name(local_name)]
        local_shard = local_shard_of("x", parameter)
        with torch.no_grad():
            if weight.kind in ("norm", "bias"):
                local_shard.data.fill_(1.0 if weight.kind == "norm" else 0.0)
            elif local_shard.data.numel():
                _draw(local_shard.data, local_shard.offset, weight, model.shape, seed)


def _draw(part: Tensor, offset: tuple[int, ...], weight: Weight, shape: GPTShape, seed: int) -> None:
    (start, column), (rows, columns) = offset, part.shape
    whole_rows, whole_columns = weight.shape
    for band in range(start // BAND, -(-(start + rows) // BAND)):
        first, last = band * BAND, min((band + 1) * BAND, whole_rows)
        drawn = torch.empty(last - first, whole_columns).normal_(
            0.0, shape.std(weight), generator=_generator(seed, weight.name, band)
        )
        top, bottom = max(first, start), min(last, start + rows)
        part[top - start : bottom - start].copy_(drawn[top - first : bottom - first, column : column + columns])


def _generator(seed: int, name: str, band: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}:{band}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
