"""Which ranks of a generation are on which node, and on which of its devices they compute.

Ranks of one node follow each other, and nodes follow each other by node rank, as `torchrun` numbers them. An assignment does not
change: each generation has one of its own.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate


class RankAssignment:
    """The ranks of one generation.

    Args:
        nodes: that take part, by node rank; distinct.
        counts: how many ranks each of them has.
        devices: of nodes that do not compute on all of theirs, the devices by local rank; others have device = local rank.
    """

    def __init__(self, nodes: Sequence[int], counts: Sequence[int], devices: Mapping[int, tuple[int, ...]] | None = None) -> None:
        self.nodes = tuple(nodes)
        self._node_ranks = {node: node_rank for node_rank, node in enumerate(self.nodes)}
        self._firsts = [0, *accumulate(counts)]  # the first rank of each node, then the number of all ranks
        self._devices = dict(devices or {})

    def __contains__(self, node: object) -> bool:
        return node in self._node_ranks

    def __len__(self) -> int:
        """How many nodes take part."""
        return len(self.nodes)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._firsts[-1]

    def ranks(self, node: int) -> range:
        """The ranks on a node; none on one that does not take part."""
        if node not in self._node_ranks:
            return range(0)
        at = self._node_ranks[node]
        return range(self._firsts[at], self._firsts[at + 1])

    def node_rank_of(self, rank: int) -> int:
        """The node rank of the node that has a rank."""
        return bisect_right(self._firsts, rank) - 1

    def node_of(self, rank: int) -> int:
        """The node that has a rank."""
        return self.nodes[self.node_rank_of(rank)]

    def devices(self, node: int) -> tuple[int, ...]:
        """The devices of a node on which its ranks compute, by local rank."""
        return self._devices.get(node) or tuple(range(len(self.ranks(node))))

    def device_of(self, rank: int) -> int:
        """The device on which a rank computes, as its node numbers them."""
        node = self.node_of(rank)
        return self.devices(node)[rank - self.ranks(node).start]
