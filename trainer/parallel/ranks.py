"""This rank's place in the layout.

Neighbouring ranks share tensors, then sequences, then batches, then layers: rank = ((pp × DP + dp) × CP + cp) × TP + tp. So
what talks most is inside a node.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from resilient.worker import Layout


@dataclass(frozen=True)
class Ranks:
    """The mesh over all ranks, and this rank's coordinates in it.

    The mesh has the dimensions of more than one rank, and `dp` in any case, which shards parameters also where it has one.
    """

    layout: Layout
    mesh: DeviceMesh
    pp_rank: int
    dp_rank: int
    cp_rank: int
    tp_rank: int

    @cached_property
    def tensor(self) -> DeviceMesh:
        return self.mesh["tp"]

    @cached_property  # slicing a mesh makes one
    def shards(self) -> DeviceMesh:
        """The ranks that shard parameters among them: data parallelism, and context parallelism with it."""
        return self.mesh["shard"] if self.layout.cp > 1 else self.mesh["dp"]

    @property
    def counts_loss(self) -> bool:
        """Whether this rank speaks for its part of the batch: of those that compute the same loss, the one that counts."""
        return self.tp_rank == 0 and self.pp_rank == self.layout.pp - 1

    @property
    def embedding_peer(self) -> int | None:
        """Global rank that holds the other copy of a tied embedding, where the pipeline parts the two; None: no other."""
        pp = self.layout.pp
        if pp == 1 or self.pp_rank not in (0, pp - 1):
            return None
        between = self.layout.dp * self.layout.cp * self.layout.tp * (pp - 1)
        mine = ((self.pp_rank * self.layout.dp + self.dp_rank) * self.layout.cp + self.cp_rank) * self.layout.tp + self.tp_rank
        return mine + between if self.pp_rank == 0 else mine - between


def make_ranks(device: torch.device, layout: Layout) -> Ranks:
    """The mesh over all ranks of the default group. No process group communicates among one rank."""
    sizes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    shared = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    mesh = init_device_mesh(device.type, tuple(shared.values()), mesh_dim_names=tuple(shared))
    if "dp" not in shared:
        mesh = _with_dp_of_one(mesh, device)
    if layout.cp > 1:  # a group of its own also beside a dp of one: parameters are put together while keys and values go around
        mesh["dp", "cp"]._flatten("shard")
    place = {name: mesh.get_local_rank(name) if name in shared else 0 for name in sizes}
    return Ranks(layout, mesh, place["pp"], place["dp"], place["cp"], place["tp"])


def sharing(ranks: Ranks) -> dist.ProcessGroup | None:
    """The ranks that hold the parts of this pipeline stage's parameters; None: this rank is alone. All ranks call this."""
    layout = ranks.layout
    size = layout.dp * layout.cp * layout.tp
    if size == 1:
        return None
    if layout.pp == 1:
        return dist.group.WORLD
    members = range(ranks.pp_rank * size, (ranks.pp_rank + 1) * size)
    group: dist.ProcessGroup = dist.new_group(list(members), use_local_synchronization=True)
    return group


def _with_dp_of_one(mesh: DeviceMesh, device: torch.device) -> DeviceMesh:
    """The same ranks with a dimension `dp` of one.

    Its group never communicates, so it is made without the others: `new_group` over NCCL would split the default communicator once
    for every rank, and have gloo connect beside it.
    """
    alone = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)
    names = mesh.mesh_dim_names or ()
    at = 1 if names[:1] == ("pp",) else 0
    groups, shape = [mesh.get_group(name) for name in names], list(mesh.shape)
    order = torch.arange(math.prod(shape), dtype=torch.int)
    return DeviceMesh.from_group(
        [*groups[:at], alone, *groups[at:]],
        device.type,
        order.view(*shape[:at], 1, *shape[at:]),
        mesh_dim_names=(*names[:at], "dp", *names[at:]),
    )
