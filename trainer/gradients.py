"""What all ranks must know of a step: the mean loss, the global gradient norm.

One reduction over all ranks carries both, so that every rank comes to the same verdict from the same numbers. They stay on the
device until they are read, which waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from trainer.local import local
from trainer.model import GPT
from trainer.parallel import Ranks


@dataclass(frozen=True)
class Found:
    """Of one step: the mean loss over the tokens that have a target, the norm of the whole gradient, and `extra` summed up."""

    loss: float
    norm: float
    extra: float


class Measured:
    """`Found`, on the device: 0-dimensional fp64 tensors, the same on all ranks."""

    def __init__(self, loss: Tensor, norm: Tensor, extra: Tensor) -> None:
        self.loss, self.norm = loss, norm
        self._all = torch.stack([loss, norm, extra])

    def read(self) -> Found:
        """The numbers. Waits until the device has them."""
        return Found(*self._all.tolist())


def sum_tied(stages: Sequence[GPT], ranks: Ranks) -> None:
    """Add up the gradients of a tied embedding that the pipeline has parted. Both copies then take the same step."""
    peer, shape = ranks.embedding_peer, stages[0].shape
    if not shape.tied or peer is None:
        return
    weight = stages[0].embedding.weight if ranks.pp_rank == 0 else stages[-1].head.weight
    assert weight.grad is not None
    mine = local(weight.grad).contiguous()
    theirs = torch.empty_like(mine)
    if mine.numel():
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])
        for work in works:
            work.wait()
        local(weight.grad).add_(theirs)


def agree(stages: Sequence[GPT], ranks: Ranks, loss: Tensor, counted: Tensor, extra: float) -> Measured:
    """Reduce over all ranks.

    Args:
        loss: summed over this rank's tokens.
        counted: tokens of the global batch that have a target.
        extra: any number of this rank, to be summed.
    """
    own = loss if ranks.counts_loss else torch.zeros_like(loss)
    numbers = torch.stack([own, _squares(stages, loss.device), torch.full_like(own, extra)])
    dist.all_reduce(numbers)
    total, squares, extras = numbers.unbind()
    return Measured(total / counted, squares.sqrt(), extras)


def clip(stages: Sequence[GPT], norm: Tensor, limit: float) -> None:
    """Scale gradients down to the limit; 0: no limit."""
    if not limit:
        return
    parts = [local(p.grad) for model in stages for p in model.parameters() if p.grad is not None]
    torch._foreach_div_(parts, excess(norm, limit))


def excess(norm: Tensor, limit: float) -> Tensor:
    """By what gradients are divided so that their norm keeps to a limit: 1 where it does, fp32."""
    return ((norm + 1e-6) / limit).clamp(min=1.0).float()


def _squares(stages: Sequence[GPT], device: torch.device) -> Tensor:
    """This rank's share of the squared norm. The number of kernels does not grow with that of the parameters."""
    parts: dict[int, list[Tensor]] = {}  # by the number of ranks that hold the same
    for model in stages:
        for name, parameter in model.named_parameters():
            if parameter.grad is None or (name == "head.weight" and model.shape.tied and not model.stage.first):
                continue
            part = local(parameter.grad)
            if part.numel():
                parts.setdefault(_copies(parameter.grad), []).append(part)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if not parts:
        return squares
    every = [part for same in parts.values() for part in same]
    norms = torch.stack(torch._foreach_norm(every, 2, dtype=torch.float32)).double()
    for copies, same in zip(parts, torch.split(norms, [len(same) for same in parts.values()]), strict=True):
        squares.add_(same.dot(same), alpha=1 / copies)
    return squares


def _copies(tensor: Tensor) -> int:
    """Ranks that hold the same part."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            copies *= tensor.device_mesh.size(dim)
    return copies
