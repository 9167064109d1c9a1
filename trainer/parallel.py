"""Parallelism, applied to a plain model from outside: the mesh, sharded data parallelism, and weights that no layout changes.

Data parallelism is PyTorch's `fully_shard` without resharding after the forward pass: fp32 master weights and optimizer state are
sharded, computing is in the precision asked for, gradients are reduced in fp32.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trainer.model import GPT
from trainer.shape import GPTShape


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the layout."""

    mesh: DeviceMesh
    dp: int
    dp_rank: int


def make_ranks(device: torch.device, dp: int) -> Ranks:
    """The mesh over all ranks of the default group."""
    mesh = init_device_mesh(device.type, (dp,), mesh_dim_names=("dp",))
    return Ranks(mesh, dp, mesh.get_local_rank("dp"))


def build_model(shape: GPTShape, ranks: Ranks, precision: str, device: torch.device) -> GPT:
    """A sharded model on `device`, its memory not yet written: fill it by `initialize`, or from a checkpoint."""
    with torch.device("meta"):
        model = GPT(shape)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=ranks.mesh["dp"], reshard_after_forward=False, mp_policy=policy)
    fully_shard(model, mesh=ranks.mesh["dp"], reshard_after_forward=False, mp_policy=policy)
    model.to_empty(device=device)
    return model


def sync_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass reduces gradients over the data-parallel ranks, or only adds them up."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(wanted)


def reshard(model: nn.Module) -> None:
    """Go back to the shards after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def initialize(model: GPT, seed: int) -> None:
    """Set every parameter to what (seed, its name) says, whatever part of it lies here.

    Norms are 1; matrices are normal with `init_std`, those that write into the residual stream with init_std / sqrt(2 × layers)
    (Radford et al., 2019).
    """
    shape = model.shape
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter.fill_(1.0)
            continue
        into_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        std = shape.init_std / (2 * shape.layers) ** 0.5 if into_residual else shape.init_std
        whole = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=_generator(seed, name))
        set_part(parameter, whole)


def set_part(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Give a parameter, distributed or not, its part of a whole tensor."""
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            parameter.copy_(whole)
            return
        (placement,) = parameter.placements
        local = parameter.to_local()
        if isinstance(placement, Shard):
            mesh = parameter.device_mesh
            rows = -(-parameter.shape[placement.dim] // mesh.size())
            start = min(mesh.get_local_rank() * rows, parameter.shape[placement.dim])
            whole = whole.narrow(placement.dim, start, local.shape[placement.dim])
        local.copy_(whole)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
