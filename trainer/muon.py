"""Muon (Jordan et al., 2024) for the inner matrices, AdamW for all other parameters.

The update of a matrix is its orthogonalised momentum, which only the whole matrix has. Each matrix has an owner among the ranks
that share the stage's parameters: they send it their parts of the momentum, in the precision in which it is orthogonalised, and it
sends the parts of the update back. So each rank orthogonalises its share of the matrices, and holds no more than that.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from checkpoint import local_shard_of
from trainer.adamw import update
from trainer.local import local

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic iteration
ITERATIONS = 5

Box = tuple[slice, slice]
"""Rows and columns of a matrix."""


@dataclass(frozen=True)
class _Part:
    """Of one matrix: its index, its owner, and where this rank's part lies in it."""

    index: int
    owner: int
    boxes: Sequence[Box]  # by rank


class Muon(torch.optim.Optimizer):
    """Groups with `muon: True` hold matrices; updates are scaled to the size of AdamW's (Liu et al., 2025), for the same rate.

    Args:
        sharing: the process group whose ranks hold all parts of the parameters; None: this rank holds them whole.
        momentum: decay rate of the matrices' momentum.
        betas: AdamW's decay rates, of the other parameters.
        dtype: in which momenta are orthogonalised. In bf16, as torch's own Muon does it, the last bits of an update depend on the
            order in which gradients were summed up, and so on the layout.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        sharing: dist.ProcessGroup | None,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "muon": False})
        self._momentum = momentum
        self._sharing, self._dtype = sharing, dtype
        self._matrices: list[tuple[nn.Parameter, dict[str, Any]]] = [
            (parameter, group) for group in self.param_groups if group["muon"] for parameter in group["params"]
        ]
        self._parts = _distribute([parameter for parameter, _ in self._matrices], sharing)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter; all ranks that share parameters take part."""
        for group in self.param_groups:
            if not group["muon"]:
                update(group, self.state)
        for (parameter, group), change in zip(self._matrices, self._orthogonal(), strict=True):
            value = local(parameter)
            value.mul_(1 - group["lr"] * group["weight_decay"])
            value.add_(change, alpha=-0.2 * max(parameter.shape) ** 0.5 * group["lr"])
        return None

    def _orthogonal(self) -> list[Tensor]:
        """This rank's parts of the orthogonalised momenta."""
        ahead = []
        for parameter, _ in self._matrices:
            assert parameter.grad is not None
            state, grad = self.state[parameter], local(parameter.grad)
            state["step"] += 1
            momentum = local(state["momentum_buffer"]).lerp_(grad, 1 - self._momentum)
            ahead.append(grad.lerp(momentum, self._momentum).to(self._dtype))
        if self._sharing is None:
            return [_orthogonalised(each) for each in ahead]
        return self._exchanged(ahead)

    def _exchanged(self, ahead: Sequence[Tensor]) -> list[Tensor]:
        assert self._sharing is not None
        rank, size = dist.get_rank(self._sharing), dist.get_world_size(self._sharing)
        owned = [part for part in self._parts if part.owner == rank]
        counts_out = [sum(ahead[part.index].numel() for part in self._parts if part.owner == each) for each in range(size)]
        counts_in = [sum(_numbers(part.boxes[each]) for part in owned) for each in range(size)]

        device = ahead[0].device if ahead else torch.device("cpu")
        sent = torch.empty(sum(counts_out), dtype=self._dtype, device=device)
        places = torch.split(sent, [ahead[part.index].numel() for part in self._by_owner()])
        for part, place in zip(self._by_owner(), places, strict=True):
            place.copy_(ahead[part.index].flatten())
        received = torch.empty(sum(counts_in), dtype=self._dtype, device=device)
        dist.all_to_all_single(received, sent, counts_in, counts_out, group=self._sharing)

        whole = [torch.empty(self._matrices[part.index][0].shape, dtype=self._dtype, device=device) for part in owned]
        pieces = [(matrix, part.boxes[each]) for each in range(size) for matrix, part in zip(whole, owned, strict=True)]
        lengths = [_numbers(box) for _, box in pieces]
        for (matrix, box), data in zip(pieces, torch.split(received, lengths), strict=True):
            matrix[box] = data.view(matrix[box].shape)
        for matrix in whole:
            matrix.copy_(_orthogonalised(matrix))
        for (matrix, box), data in zip(pieces, torch.split(received, lengths), strict=True):
            data.copy_(matrix[box].flatten())
        dist.all_to_all_single(sent, received, counts_out, counts_in, group=self._sharing)
        found = {part.index: place.view(ahead[part.index].shape) for part, place in zip(self._by_owner(), places, strict=True)}
        return [found[index] for index in range(len(ahead))]

    def _by_owner(self) -> list[_Part]:
        return sorted(self._parts, key=lambda part: (part.owner, part.index))


def _orthogonalised(momentum: Tensor) -> Tensor:
    """The momentum with all singular values near 1, by Newton and Schulz's iteration (Jordan et al., 2024)."""
    first, third, fifth = NEWTON_SCHULZ
    tall = momentum.size(0) > momentum.size(1)
    found = momentum.T if tall else momentum
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.T if tall else found


def _distribute(matrices: Sequence[nn.Parameter], sharing: dist.ProcessGroup | None) -> list[_Part]:
    """Give each matrix, the dearest first, to the rank that has least to do so far; every rank comes to the same."""
    if sharing is None:
        return []
    mine = [_box(matrix) for matrix in matrices]
    boxes: list[list[Box]] = [[] for _ in range(dist.get_world_size(sharing))]
    dist.all_gather_object(boxes, mine, group=sharing)
    costs = [matrix.numel() * min(matrix.shape) for matrix in matrices]
    load = [0] * len(boxes)
    owners: dict[int, int] = {}
    for index in sorted(range(len(matrices)), key=lambda index: (-costs[index], index)):
        owners[index] = load.index(min(load))
        load[owners[index]] += costs[index]
    return [_Part(index, owners[index], [each[index] for each in boxes]) for index in range(len(matrices))]


def _box(matrix: Tensor) -> Box:
    """Where the part of a matrix lies that this rank holds."""
    part = local_shard_of("matrix", matrix)
    (row, column), (rows, columns) = part.offset, part.data.shape
    return slice(row, row + rows), slice(column, column + columns)


def _numbers(box: Box) -> int:
    rows, columns = box
    return int((rows.stop - rows.start) * (columns.stop - columns.start))
