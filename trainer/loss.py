"""Cross entropy of hidden states: the head's product and the loss of it, for some of the tokens at a time.

With a large vocabulary logits are the largest tensor of a step. None outlives its chunk: both gradients that follow from them are
computed along with the loss, as in Liger Kernel (Hsu et al., 2024), and logits become their own gradient in place. Where ranks have
parts of the vocabulary, three numbers of each token go around, and no logits (Shoeybi et al., 2019).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from trainer.chunks import LIMIT_BYTES, block_rows, chunk_rows

IGNORED = -100  # as a target: predicting this token costs nothing


@dataclass(frozen=True)
class _Part:
    """The part of the vocabulary that is computed here.

    Attributes:
        most: tokens of the largest part.
        first: its first token.
        group: the ranks that have the parts; None: it is all here.
    """

    weight: Tensor
    most: int
    first: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, weight: Tensor) -> "_Part":
        """From a head's weight (vocab, hidden), which tensor parallelism may have cut along its first dimension."""
        if not isinstance(weight, DTensor):
            return cls(weight, len(weight))
        mesh = weight.device_mesh
        most = -(-weight.shape[0] // mesh.size())
        return cls(weight.to_local(), most, mesh.get_local_rank() * most, mesh.get_group())

    def reduce(self, numbers: Tensor, op: Any) -> None:
        """Over the ranks that have the parts, in place."""
        if self.group is not None:
            dist.all_reduce(numbers, op, group=self.group)


class CrossEntropy:
    """Summed cross entropy of hidden states (batch, seq, hidden) by a head's weight (vocab, hidden) and targets (batch, seq).

    Args:
        compiled: what is done with logits element by element is compiled: nothing is in fp32 but in registers.
        limit_bytes: of the logits that there are at a time.
    """

    def __init__(self, *, compiled: bool = False, limit_bytes: int = LIMIT_BYTES) -> None:
        self._compiled, self._limit_bytes = compiled, limit_bytes

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The loss, fp32. Weight and hidden states as tensor parallelism gives them, these whole on each rank."""
        if isinstance(hidden, DTensor):
            hidden = hidden.to_local(grad_placements=[Partial()])
        part = _Part.of(weight)
        x = hidden.flatten(0, 1)
        if not torch.is_grad_enabled():
            return self._computed(x.detach(), part, targets.flatten(), None, None)
        with torch.no_grad():
            of_hidden, of_weight = torch.empty_like(x), torch.empty_like(part.weight)
            loss = self._computed(x, part, targets.flatten(), of_hidden, of_weight)
        # One node for each, for a pipeline that parts the backward pass asks for the two at different times.
        of_x: Tensor = _Known.apply(x, loss, of_hidden)  # type: ignore[no-untyped-call]
        return of_x + _Known.apply(part.weight, torch.zeros_like(loss), of_weight)  # type: ignore[no-untyped-call, no-any-return]

    def _computed(self, x: Tensor, part: _Part, targets: Tensor, of_hidden: Tensor | None, of_weight: Tensor | None) -> Tensor:
        """The loss of hidden states (tokens, hidden); its gradients are written into what is given for them."""
        rows = chunk_rows(len(x), part.most, x.element_size(), self._limit_bytes)
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        for first in range(0, len(x), rows):
            chunk = slice(first, first + rows)
            logits = F.linear(x[chunk], part.weight)
            losses[chunk] = self._losses(logits, targets[chunk], part, differentiate=of_hidden is not None)
            if of_hidden is not None and of_weight is not None:
                torch.mm(logits, part.weight, out=of_hidden[chunk])
                of_weight.addmm_(logits.T, x[chunk], beta=min(first, 1))
            del logits  # before the next ones are there
        return losses.sum()

    def _losses(self, logits: Tensor, targets: Tensor, part: _Part, *, differentiate: bool) -> Tensor:
        """Losses (tokens) of logits (tokens, this rank's vocabulary), which become the gradient of their sum."""
        count = logits.shape[1]
        rows = len(logits) if self._compiled else block_rows(count, self._limit_bytes, cpu=logits.device.type == "cpu")
        blocks = [slice(first, first + rows) for first in range(0, len(logits), rows)]
        here = (targets >= part.first) & (targets < part.first + count)
        place = torch.where(here, targets - part.first, 0)[:, None]
        top = logits.amax(1).float()
        part.reduce(top, dist.ReduceOp.MAX)
        total = torch.cat([self._sums(logits[block], top[block]) for block in blocks])
        chosen = torch.where(here, logits.gather(1, place).squeeze(1) - top, 0.0)
        sums = torch.stack([total, chosen])
        part.reduce(sums, dist.ReduceOp.SUM)
        total, chosen = sums[0].log(), sums[1]
        ignored = targets == IGNORED
        losses = (total - chosen).masked_fill_(ignored, 0.0)
        if differentiate:
            shift = (top + total).masked_fill_(ignored, torch.inf)
            for block in blocks:
                self._exponentials(logits[block], shift[block])
            # Of the target, less 1: by its loss, since next to 1 nothing would be left of the difference in bf16.
            right = torch.expm1(-losses).to(logits.dtype)[:, None]
            logits.scatter_(1, place, torch.where(here[:, None], right, logits.gather(1, place)))
        return losses

    @cached_property
    def _sums(self) -> Any:
        return torch.compile(_sums, fullgraph=True) if self._compiled else _sums

    @cached_property
    def _exponentials(self) -> Any:
        return torch.compile(_exponentials, fullgraph=True) if self._compiled else _exponentials


def _sums(logits: Tensor, shift: Tensor) -> Tensor:
    """Sums of exp(logits - shift), fp32."""
    return logits.to(torch.float32, copy=True).sub_(shift[:, None]).exp_().sum(1)


def _exponentials(logits: Tensor, shift: Tensor) -> None:
    """Logits become exp(logits - shift); both in fp32 on the way."""
    logits.copy_(logits.to(torch.float32, copy=True).sub_(shift[:, None]).exp_())


class _Known(torch.autograd.Function):
    """A number whose gradient is known already. It is handed on once, and nobody else holds it then."""

    @staticmethod
    def forward(ctx: Any, _x: Tensor, number: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return number.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("the gradient of this loss was asked for twice; compute the loss again")
        return gradient.mul_(above), None, None
