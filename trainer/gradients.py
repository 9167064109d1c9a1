"""What all ranks must know of a step before the weights change: the mean loss, the global gradient norm.

One reduction over all ranks carries both, so that every rank comes to the same verdict from the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainer.model import GPT
from trainer.parallel import Ranks


@dataclass(frozen=True)
class Found:
    """Of one step: the mean loss over the tokens that have a target, the norm of the whole gradient, and `extra` summed up."""

    loss: float
    norm: float
    extra: float


def sum_tied(stages: Sequence[GPT], ranks: Ranks) -> None:
    """Add up the gradients of a tied embedding that the pipeline has parted. Both copies then take the same step."""
    peer, shape = ranks.embedding_peer, stages[0].shape
    if not shape.tied or peer is None:
        return
    weight = stages[0].embedding.weight if ranks.pp_rank == 0 else stages[-1].head.weight
    assert weight.grad is not None
    mine = _local(weight.grad).contiguous()
    theirs = torch.empty_like(mine)
    if mine.numel():
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])
        for work in works:
            work.wait()
        _local(weight.grad).add_(theirs)


def agree(stages: Sequence[GPT], ranks: Ranks, loss: Tensor, counted: Tensor, extra: float) -> Found:
    """Reduce over all ranks.

    Args:
        loss: summed over this rank's tokens.
        counted: tokens of the global batch that have a target.
        extra: any number of this rank, to be summed.
    """
    squares = torch.zeros((), dtype=torch.float64, device=loss.device)
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.grad is None or (name == "head.weight" and model.shape.tied and not model.stage.first):
                continue
            norm = torch.linalg.vector_norm(_local(parameter.grad), dtype=torch.float32).double()
            squares += norm * norm / _copies(parameter.grad)
    own = loss if ranks.counts_loss else torch.zeros_like(loss)
    numbers = torch.stack([own, squares, torch.full_like(own, extra)])
    dist.all_reduce(numbers)
    total, squared, extras = numbers.tolist()
    return Found(total / float(counted), squared**0.5, extras)


def clip(stages: Sequence[GPT], norm: float, limit: float) -> None:
    """Scale gradients down to the limit; 0: no limit."""
    if not limit or norm <= limit:
        return
    parts = [_local(p.grad) for model in stages for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(parts, limit / (norm + 1e-6))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: Tensor) -> int:
    """Ranks that hold the same part."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            copies *= tensor.device_mesh.size(dim)
    return copies
