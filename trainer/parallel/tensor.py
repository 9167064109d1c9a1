"""Tensor and sequence parallelism (Shoeybi et al., 2019; Korthikanti et al., 2022), by PyTorch's DTensor.

Queries, keys, values and the MLP's way up are cut by rows, what writes into the residual stream by columns, embedding and head by
the vocabulary. With sequence parallelism, norms, dropout and residuals work on a part of the sequence. Norms are distributed
tensors either way, so that all parameters are on one mesh.
"""

from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.model import GPT, Attention
from trainer.parallel.overlap import GatheredFor, ScatteredFrom
from trainer.shape import GPTShape


def apply(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool, overlap: bool = False) -> None:
    """Spread a model over the tensor-parallel ranks of `mesh`, in place.

    Args:
        overlap: layers exchange while they multiply; with sequence parallelism.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence_parallel else _Whole()
    shape = model.shape
    own_kv = shape.kv_heads % mesh.size() == 0
    layer = {"attention_norm": norm, "mlp_norm": norm}
    layer |= _overlapping(shape, own_kv=own_kv) if overlap else _exchanging(shape, stream, own_kv=own_kv)
    plan = {f"blocks.{number}.{name}": style for number in model.stage.layers for name, style in layer.items()}
    if model.stage.first:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        if shape.position == "learned":
            plan["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if model.stage.last:
        plan["norm"] = norm
        plan["head"] = _ByVocabulary(stream)
    parallelize_module(model, mesh, plan)
    if shape.tied and model.stage.first and model.stage.last:
        model.head.weight = model.embedding.weight
    for module in model.modules():
        if isinstance(module, Attention):
            _settle_heads(module, shape, mesh, own_kv=own_kv, same_random=not sequence_parallel)


def _exchanging(shape: GPTShape, stream: Placement, *, own_kv: bool) -> dict[str, ParallelStyle]:
    """Of a layer's matrices: exchanges before and after them. Args: stream: how the residual stream is spread."""
    kv: ParallelStyle = ColwiseParallel() if own_kv else _WholeForEach()
    found: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "attention.query": ColwiseParallel(),
        "attention.key": kv,
        "attention.value": kv,
        "attention.output": RowwiseParallel(output_layouts=stream),
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=stream),
    }
    if shape.gated:
        found["mlp.gate"] = ColwiseParallel()
    return found


def _overlapping(shape: GPTShape, *, own_kv: bool) -> dict[str, ParallelStyle]:
    """Of a layer's matrices: exchanges beside them."""
    kv: Placement = Shard(0) if own_kv else Replicate()
    return {
        "attention": GatheredFor({"query": Shard(0), "key": kv, "value": kv}),
        "attention.output": ScatteredFrom(),
        "mlp": GatheredFor({name: Shard(0) for name in (("gate", "up") if shape.gated else ("up",))}),
        "mlp.down": ScatteredFrom(),
    }


def _settle_heads(attention: Attention, shape: GPTShape, mesh: DeviceMesh, *, own_kv: bool, same_random: bool) -> None:
    count, rank = shape.heads // mesh.size(), mesh.get_local_rank()
    attention.core.head_offset = rank * count
    if not own_kv:
        attention.kv_shares = kv_shares(shape, mesh.size(), rank)
    if same_random:
        attention.core.separate_random = rank


def kv_shares(shape: GPTShape, size: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The heads of keys and values that a rank's queries attend to, in their order, and how many of its heads of queries do. Pure.

    Args:
        size: tensor-parallel ranks.
    """
    count, group = shape.heads // size, shape.heads // shape.kv_heads
    found = Counter(head // group for head in range(rank * count, (rank + 1) * count))
    return tuple(found.items())


class _Whole(ParallelStyle):
    """Each rank computes the same with the whole parameter."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


class _WholeForEach(ParallelStyle):
    """Each rank computes the same with the whole parameter, and then uses a part of its own: gradients are sums over the ranks.

    For keys and values of which there are fewer than ranks (or that do not come out even).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
            return output.to_local(grad_placements=[Partial()])

        return distribute_module(module, device_mesh, None, None, leave)  # type: ignore[arg-type]


class _ByVocabulary(ParallelStyle):
    """The head: each rank has the whole stream and a part of the vocabulary. It gives a part of the logits, or the whole loss.

    Args:
        stream: how its input is spread.
    """

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))  # type: ignore[arg-type]

        def enter(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x, *others = inputs
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [self._stream], run_check=False)
            return (x.redistribute(placements=[Replicate()]), *others)

        def leave(_module: nn.Module, output: Tensor, _mesh: DeviceMesh) -> Tensor:
            return output.to_local() if isinstance(output, DTensor) else output

        return distribute_module(module, device_mesh, cut, enter, leave)  # type: ignore[arg-type]
