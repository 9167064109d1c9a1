"""Sharded data parallelism: PyTorch's `fully_shard`.

fp32 master weights and optimizer state are sharded (ZeRO-1, Rajbhandari et al., 2020), computing is in the precision asked for,
gradients are reduced in fp32. At stage 2 gradients are reduced after each micro batch, at stage 3 parameters too are put together
only when they are needed.
"""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.model import GPT

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # by the config's `train.precision`, decided

# Of outputs that tensor parallelism gives, which are views; nobody changes them in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def apply(model: GPT, mesh: DeviceMesh, *, precision: str, zero_stage: int) -> None:
    """Shard a model over the ranks of `mesh`, in place: layer by layer, and what is around them."""
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)
    again = zero_stage == 3
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=again, mp_policy=policy)


def between_replicas(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass ends with what is between replicas: gradients are reduced, and of parameters the shards stay.

    Otherwise gradients are only added up, and parameters stay whole for the next pass: then nothing is exchanged before the last
    backward pass, and replicas may differ in their number of passes.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(wanted)
    model.set_reshard_after_backward(wanted)


def reshard(model: nn.Module) -> None:
    """Go back to the shards after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
