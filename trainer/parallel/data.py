"""Sharded data parallelism: PyTorch's `fully_shard`.

fp32 master weights and optimizer state are sharded (ZeRO-1, Rajbhandari et al., 2020), computing is in the precision asked for,
gradients are reduced in fp32, in the last backward pass of a step or in each. At stages 1 and 2 parameters are put together once
a step, at stage 3 only when they are needed. With hybrid sharding (Zhao et al., 2023) groups of ranks hold the same shards: those
of gradients are then summed up between the groups, in fp32 as well.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from trainer.model import GPT

# As torch calls it from 2.12 on, and before.
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # by the config's `train.precision`, decided

# Of outputs that tensor parallelism gives, which are views; nobody changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def apply(model: GPT, mesh: DeviceMesh, *, precision: str, zero_stage: int, grad_dtype: str = "fp32") -> None:
    """Shard a model over the ranks of `mesh`, in place: layer by layer, and what is around them.

    Args:
        mesh: of one dimension, or of two, along the first of which ranks hold the same shards.
        grad_dtype: of whole gradients that add up over micro batches; `bf16` only where that is the precision.
    """
    as_computed = grad_dtype == precision == "bf16"
    # Gradients that are to be reduced in another type than they are computed in add up in that type, so for bf16 the type that
    # is named is theirs, and the buffers of the reduction are fp32 all the same.
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=None if as_computed else torch.float32)
    again = zero_stage == 3
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
        if as_computed:
            assert isinstance(module, FSDPModule)
            module.set_custom_reduce_scatter(_Float32ReduceScatter())


class _Float32ReduceScatter(ReduceScatter):
    """Reduces gradients of any type in fp32: what is copied into the buffer is converted. Its result is what groups sum up."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=torch.float32, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = getattr(dist, REDUCE_SCATTER)(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def begin_backward(model: nn.Module, *, reduce: bool, reshard: bool) -> None:
    """Say what the next backward pass ends with.

    Without either, nothing is exchanged between replicas, which may differ in their number of such passes.

    Args:
        reduce: gradients are reduced, layer by layer; else they are only added up.
        reshard: of parameters the shards stay; else they stay whole for the next pass.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(reduce)
    model.set_reshard_after_backward(reshard)


def sharded_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """What is put together and reduced at once: what is around the layers, then the layers in their order."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for state in states for group in _groups(state)]


def _groups(state: FSDPState) -> list[FSDPParamGroup]:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = state._fsdp_param_group  # before torch 2.12 there is one at the most
    return [] if group is None else [group]


def reduce_now(group: FSDPParamGroup) -> None:
    """Reduce the gradients of a group that a backward pass without FSDP's hooks has left."""
    group.post_backward()  # adds up, so that the gradients of all its parameters are of one type
    group.reduce_grads = group.all_reduce_grads = True
    group.post_backward()


def reshard(model: nn.Module) -> None:
    """Go back to the shards after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
