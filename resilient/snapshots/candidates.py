"""Candidates: what workers may go on from, as every node is told it with its start."""

from collections.abc import Sequence

from checkpoint.protocol import SnapshotKey
from resilient.protocol.candidates import Candidate, Holder, pack
from resilient.snapshots.catalog import Catalog, Snapshot

CANDIDATES = 6


class Candidates:
    """The candidates, packed once for all nodes.

    Invariant: what was packed is used again only while the catalog is the one that it was made of.

    Args:
        tiers: the nodes' tiers, fastest first.
    """

    def __init__(self, catalog: Catalog, tiers: Sequence[str]) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._packed = b""
        self._version: int | None = None

    def packed(self) -> bytes:
        """Newest snapshot first; of each shard those who hold it, fastest tier first."""
        if self._version != self._catalog.version:
            newest = sorted(self._catalog.whole(), reverse=True)[:CANDIDATES]
            self._packed = pack([self._candidate(key, self._catalog.snapshots[key]) for key in newest])
            self._version = self._catalog.version
        return self._packed

    def _candidate(self, key: SnapshotKey, snapshot: Snapshot) -> Candidate:
        holders: list[list[Holder]] = [[] for _ in range(snapshot.shards)]
        needed = 0
        for place, tier in enumerate(self._tiers):
            for shard, nodes in snapshot.tiers.get(tier, {}).items():
                if not holders[shard]:
                    needed = max(needed, place)
                holders[shard] += [
                    Holder(node, self._catalog.addresses[node], location.directory) for node, location in sorted(nodes.items())
                ]
        return Candidate(key=key, tier=self._tiers[needed], shards=tuple(map(tuple, holders)))
