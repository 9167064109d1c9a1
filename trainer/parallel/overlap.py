"""Tensor parallelism whose exchanges go on while matrices are multiplied (Wang et al., 2023), with sequence parallelism.

An exchange among the ranks and the products that it feeds, or is fed by, are done block by block; a block is a rank's part of the
sequence. Where ranks gather, each multiplies the block that it has while the next one is on its way around the ring. Where they
sum up and scatter, each computes its product for a block while the sum of the others' is on its way. Backward passes turn the two
around. Instead of a collective before or after the products there are size - 1 transfers, each beside one of them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


class GatheredFor(ParallelStyle):
    """A module that only hands its input to some of its linear layers: their products are computed before it runs, at once.

    It is given a part of the sequence on each rank, and its layers give (batch, seq, their outputs here).

    Args:
        weights: how the layers are spread, by name.
    """

    def __init__(self, weights: Mapping[str, Placement]) -> None:
        self._weights = weights

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers = [module.get_submodule(name) for name in self._weights]
        for layer, placement in zip(layers, self._weights.values(), strict=True):
            _spread(layer, device_mesh, placement, placement)
            layer.forward = partial(_taken, layer)
        group = device_mesh.get_group()

        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_gathered_products(inputs[0], layers, group), *inputs[1:])

        module.register_forward_pre_hook(before)
        return module


class ScatteredFrom(ParallelStyle):
    """A linear layer cut by columns, whose result is summed up: each rank is given its part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _spread(module, device_mesh, Shard(1), Replicate())
        module.forward = partial(_scattered_product, module, device_mesh.get_group())
        return module


def _spread(layer: Any, mesh: DeviceMesh, weight: Placement, bias: Placement) -> None:
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [weight]))
    if layer.bias is not None:
        layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [bias]))


def _local(parameter: DTensor) -> Tensor:
    """What of a parameter is here. Where that is all of it, gradients are sums over the ranks."""
    placements = [Partial() if each.is_replicate() else each for each in parameter.placements]
    found: Tensor = parameter.to_local(grad_placements=placements)
    return found


def _taken(layer: nn.Module, products: dict[nn.Module, Tensor]) -> Tensor:
    return products[layer]


def _gathered_products(x: Tensor, layers: list[Any], group: dist.ProcessGroup) -> dict[nn.Module, Tensor]:
    """By layer. Args: x: this rank's part of the sequence."""
    part = x.to_local() if isinstance(x, DTensor) else x
    weights = [_local(layer.weight) for layer in layers]
    found = _GatherMultiply.apply(group, part, *weights)  # type: ignore[no-untyped-call]
    return {
        layer: product if layer.bias is None else product + _local(layer.bias) for layer, product in zip(layers, found, strict=True)
    }


def _scattered_product(layer: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    found: Tensor = _MultiplyScatter.apply(group, x, _local(layer.weight))  # type: ignore[no-untyped-call]
    return found if layer.bias is None else found + _local(layer.bias)


class _GatherMultiply(torch.autograd.Function):
    """Of parts (batch, seq / size, inputs): the products of all of them with each weight (outputs, inputs)."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, part: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        whole, products = _multiplied_around(part, group, lambda block: [F.linear(block, weight) for weight in weights])
        ctx.group = group
        ctx.save_for_backward(whole, *weights)
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        blocks = [gradient.chunk(ctx.group.size(), 1) for gradient in gradients]

        def product(block: int) -> Tensor:
            summed: Tensor = blocks[0][block] @ weights[0]
            for each, weight in zip(blocks[1:], weights[1:], strict=True):
                summed = summed + each[block] @ weight
            return summed

        part = _summed_around(product, ctx.group)
        return (None, part, *(_of_weight(gradient, whole) for gradient in gradients))


class _MultiplyScatter(torch.autograd.Function):
    """Of (batch, seq, part of the inputs): the products with a weight (outputs, part), summed up, for this rank's part of seq."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        blocks = x.chunk(group.size(), 1)
        return _summed_around(lambda block: F.linear(blocks[block], weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        whole, (of_x,) = _multiplied_around(gradient, ctx.group, lambda block: [block @ weight])
        return None, of_x, _of_weight(whole, x)


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, 1).T @ x.flatten(0, 1)


def _multiplied_around(
    part: Tensor, group: dist.ProcessGroup, products: Callable[[Tensor], list[Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """All parts, and the products of all, in the order of the ranks; along the second dimension."""
    found = sorted(((rank, block, products(block)) for rank, block in _around(part, group)), key=lambda each: each[0])
    _, blocks, multiplied = zip(*found, strict=True)
    return torch.cat(blocks, 1), [torch.cat(each, 1) for each in zip(*multiplied, strict=True)]


def _around(part: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Each rank with its part, this one first. While one is worked on, the next one is on its way."""
    rank, size = group.rank(), group.size()
    held = part.contiguous()
    for step in range(size - 1):
        coming, works = _handed_on(held, group)
        yield (rank - step) % size, held
        for work in works:
            work.wait()
        held = coming
    yield (rank + 1) % size, held


def _summed_around(product: Callable[[int], Tensor], group: dist.ProcessGroup) -> Tensor:
    """The ranks' products for the part of this one, summed up. While one is computed, the sum that it is added to is on its way."""
    rank, size = group.rank(), group.size()
    summed = product((rank - 1) % size)
    for step in range(1, size):
        coming, works = _handed_on(summed, group)
        mine = product((rank - 1 - step) % size)
        for work in works:
            work.wait()
        summed = mine + coming  # not in place: recomputation keeps products
    return summed


def _handed_on(block: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Begin to send a block to the next rank of the ring: what comes from the one before, once all that is begun has ended."""
    rank, size = group.rank(), group.size()
    coming = torch.empty_like(block)
    sending = dist.P2POp(dist.isend, block, group=group, group_peer=(rank + 1) % size)
    receiving = dist.P2POp(dist.irecv, coming, group=group, group_peer=(rank - 1) % size)
    return coming, dist.batch_isend_irecv([sending, receiving])
