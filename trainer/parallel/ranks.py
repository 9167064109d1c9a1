"""This rank's place in the layout.

Neighbouring ranks share tensors, then sequences, then batches, then layers: rank = ((pp × DP + dp) × CP + cp) × TP + tp. So
what talks most is inside a node. With hybrid sharding, dp = replicate × DP_SHARD + shard: neighbours shard the state, and those
that hold the same shards are far apart, on different nodes where a group of shards fills some.
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

    The mesh has the dimensions of more than one rank, and `dp` in any case, which shards parameters also where it has one. With
    hybrid sharding, `dp` is `dp_replicate` and `dp_shard` together, of which the second one is there in any case.
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
        """The ranks that shard parameters among them: data parallelism, and context parallelism with it.

        Two dimensions with hybrid sharding: those that hold the same, and those that shard it.
        """
        if self.layout.dp_replicate > 1:
            return self.mesh["dp_replicate", "shard" if self.layout.cp > 1 else "dp_shard"]
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
    hybrid = layout.dp_replicate > 1
    shard = "dp_shard" if hybrid else "dp"
    sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, shard: layout.dp_shard, "cp": layout.cp, "tp": layout.tp}
    shared = {name: size for name, size in sizes.items() if size > 1} or {shard: 1}
    mesh = init_device_mesh(device.type, tuple(shared.values()), mesh_dim_names=tuple(shared))
    if shard not in shared:
        mesh = _with_one(mesh, shard, device)
    if hybrid:
        mesh["dp_replicate", shard]._flatten("dp")
    if layout.cp > 1:  # a group of its own also beside a dp of one: parameters are put together while keys and values go around
        mesh[shard, "cp"]._flatten("shard")
    place = {name: mesh.get_local_rank(name) if name in shared else 0 for name in sizes}
    dp_rank = place["dp_replicate"] * layout.dp_shard + place[shard]
    return Ranks(layout, mesh, place["pp"], dp_rank, place["cp"], place["tp"])


def sharing(ranks: Ranks) -> dist.ProcessGroup | None:
    """The ranks that hold the parts of this pipeline stage's parameters, each part once; None: this rank is alone. All ranks call
    this."""
    layout = ranks.layout
    size = layout.dp_shard * layout.cp * layout.tp
    if size == 1:
        return None
    if size == layout.world_size:
        return dist.group.WORLD
    first = dist.get_rank() // size * size
    members = range(first, first + size)
    group: dist.ProcessGroup = dist.new_group(list(members), use_local_synchronization=True)
    return group


def _with_one(mesh: DeviceMesh, name: str, device: torch.device) -> DeviceMesh:
    """The same ranks with a further dimension of one, behind those of the pipeline and of replicas.

    Its group never communicates, so it is made without the others: `new_group` over NCCL would split the default communicator once
    for every rank, and have gloo connect beside it.
    """
    alone = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)
    names = mesh.mesh_dim_names or ()
    at = len({"pp", "dp_replicate"}.intersection(names))
    groups, shape = [mesh.get_group(each) for each in names], list(mesh.shape)
    order = torch.arange(math.prod(shape), dtype=torch.int)
    return DeviceMesh.from_group(
        [*groups[:at], alone, *groups[at:]],
        device.type,
        order.view(*shape[:at], 1, *shape[at:]),
        mesh_dim_names=(*names[:at], name, *names[at:]),
    )
