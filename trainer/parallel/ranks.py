"""This rank's place in the layout.

Neighbouring ranks share tensors, then sequences, then batches, then layers: rank = ((pp × DP + dp) × CP + cp) × TP + tp. So
what talks most is inside a node.
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from resilient.worker import Layout


@dataclass(frozen=True)
class Ranks:
    """The mesh over all ranks, and this rank's coordinates in it."""

    layout: Layout
    mesh: DeviceMesh
    pp_rank: int
    dp_rank: int
    cp_rank: int
    tp_rank: int

    @property
    def tensor(self) -> DeviceMesh:
        return self.mesh["tp"]

    @property
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
    """The mesh over all ranks of the default group."""
    mesh = init_device_mesh(device.type, (layout.pp, layout.dp, layout.cp, layout.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    if layout.cp > 1:
        mesh["dp", "cp"]._flatten("shard")
    return Ranks(layout, mesh, *(mesh.get_local_rank(name) for name in ("pp", "dp", "cp", "tp")))
