"""The catalog: which node holds which shard of which snapshot on which tier.

A snapshot is in shards, numbered by node rank in the generation that took it; nodes whose ranks hold the same of the state, as with
hybrid sharding, have the same shard as their own. Nodes hold shards, their own and as buddies those of others, and may leave and
return. A snapshot is *whole* if somebody holds every shard, and *whole on a tier* if that tier has every shard; it is *complete* on
a tier from the moment at which the whole of it was reported there, to memory by every node. What the catalog says is what daemons
have reported and have not been told to forget since.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from checkpoint.protocol import NodeShard, SnapshotKey
from resilient.snapshots.plan import StoragePlan


@dataclass(frozen=True, slots=True)
class Location:
    """Where a node has a shard on one of its tiers, and whether only for another node."""

    directory: str
    replica: bool


@dataclass
class Snapshot:
    """What is known of a snapshot. The catalog alone changes where it lies; all others only read.

    Attributes:
        shards: that it consists of.
        tiers: by tier and shard the nodes that hold it. Invariant: no shard is listed without a node.
        copies: of each shard that somebody holds, on how many nodes and tiers. Invariant: it agrees with `tiers`.
        owners: by tier, how many nodes have a shard as their own. Invariant: it agrees with `tiers`.
        sizes: bytes of each shard that was ever reported.
        size_bytes: their sum.
        stall_s: for which training stood still, on the slowest rank.
        write_s: that the slowest node took to seal it.
        wants: tiers that are to have it.
    """

    shards: int
    tiers: dict[str, dict[int, dict[int, Location]]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    size_bytes: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    wants: frozenset[str] = frozenset()

    @property
    def whole(self) -> bool:
        """Whether somebody has every shard, anywhere."""
        return len(self.copies) == self.shards

    def whole_on(self, tier: str) -> bool:
        """Whether a tier has every shard, on whatever nodes."""
        return len(self.tiers.get(tier, ())) == self.shards

    def replicated_on(self, tier: str) -> bool:
        """Whether a tier has every shard, each on two nodes at least."""
        return self.whole_on(tier) and all(len(nodes) > 1 for nodes in self.tiers[tier].values())

    def sources(self) -> dict[int, int]:
        """Of each shard the node to read it from: its own where that is there. Of a whole one."""
        best: dict[int, tuple[bool, int]] = {}
        for shards in self.tiers.values():
            for shard, nodes in shards.items():
                found = min((location.replica, node) for node, location in nodes.items())
                best[shard] = min(best.get(shard, found), found)
        return {shard: best[shard][1] for shard in range(self.shards)}

    def own(self, tier: str) -> dict[int, tuple[int, Location]]:
        """Of each shard the first node that has it as its own on a tier, and where."""
        return {
            shard: (node, nodes[node])
            for shard, nodes in self.tiers.get(tier, {}).items()
            for node in sorted(nodes, reverse=True)
            if not nodes[node].replica
        }


class Catalog:
    """All snapshots that daemons hold.

    Invariants: a key is in `complete[tier]` only while its snapshot is whole on that tier; a snapshot is listed only while
    somebody holds a shard of it; `_held` lists of each node exactly what `snapshots` lists of it.

    Attributes:
        addresses: of the daemons that can be reached, host:port, by node.
        snapshots: by key.
        complete: by tier, in the order in which they became complete there.
        version: changes with whatever the candidates depend on.
    """

    def __init__(self, plan: StoragePlan) -> None:
        self.addresses: dict[int, str] = {}
        self.snapshots: dict[SnapshotKey, Snapshot] = {}
        self.complete: dict[str, list[SnapshotKey]] = {tier.name: [] for tier in plan.node_tiers}
        self.version = 0
        self._held: dict[int, set[tuple[SnapshotKey, str, int]]] = {}

    # -- what nodes report ---------------------------------------------------------------------------------------------

    def listen(self, node: int, address: str) -> None:
        """A node's daemon can be reached there."""
        self.addresses[node] = address
        self.version += 1

    def fits(self, shard: NodeShard) -> bool:
        """Whether there can be such a shard: a tier of that name, and as many shards as the other nodes say."""
        snapshot = self.snapshots.get(shard.key)
        shards = shard.shards if snapshot is None else snapshot.shards
        return shard.tier in self.complete and 0 <= shard.shard < shard.shards == shards

    def add(self, node: int, shard: NodeShard) -> Snapshot:
        """A node holds a shard, which fits."""
        self.version += 1
        snapshot = self.snapshots.get(shard.key)
        if snapshot is None:
            snapshot = self.snapshots[shard.key] = Snapshot(shard.shards)
        nodes = snapshot.tiers.setdefault(shard.tier, {}).setdefault(shard.shard, {})
        if node not in nodes:
            snapshot.copies[shard.shard] = snapshot.copies.get(shard.shard, 0) + 1
            self._held.setdefault(node, set()).add((shard.key, shard.tier, shard.shard))
        before = nodes.get(node)
        nodes[node] = Location(shard.directory, shard.replica)
        gained = (not shard.replica) - (before is not None and not before.replica)
        snapshot.owners[shard.tier] = snapshot.owners.get(shard.tier, 0) + gained
        snapshot.size_bytes += shard.size_bytes - snapshot.sizes.get(shard.shard, 0)
        snapshot.sizes[shard.shard] = shard.size_bytes
        return snapshot

    def replace(self, node: int, shards: Iterable[NodeShard]) -> None:
        """These are all that a node holds; whatever was known of it before is forgotten."""
        found: set[tuple[SnapshotKey, str, int]] = set()
        for each in shards:
            if self.fits(each):
                self.add(node, each)
                found.add((each.key, each.tier, each.shard))
        gone = self._held.get(node, set()) - found
        for key, tier, shard in gone:
            self._take(node, key, tier, shard)
        self._held[node] = found
        self._still_complete({(key, tier) for key, tier, _ in gone})

    def remove(self, node: int, key: SnapshotKey, tier: str, shard: int) -> None:
        """A node holds a shard no more that it was listed with; nothing changes where it was not."""
        held = self._held.get(node, set())
        if (key, tier, shard) in held:
            held.remove((key, tier, shard))
            self._take(node, key, tier, shard)
            self._still_complete([(key, tier)])

    def lose(self, node: int) -> None:
        """A node is gone, with what it holds."""
        self.addresses.pop(node, None)
        self.replace(node, ())
        del self._held[node]

    def completed(self, tier: str, key: SnapshotKey) -> None:
        """A snapshot has become complete on a tier."""
        self.complete[tier].append(key)

    # -- what is forgotten ---------------------------------------------------------------------------------------------

    def forget(self, unwanted: Callable[[SnapshotKey], bool]) -> None:
        """Know nothing of some snapshots any more."""
        for tier in self.complete:
            self.forget_on(tier, unwanted)

    def forget_on(self, tier: str, unwanted: Callable[[SnapshotKey], bool]) -> None:
        """A tier holds nothing of some snapshots any more."""
        gone = [key for key, snapshot in self.snapshots.items() if tier in snapshot.tiers and unwanted(key)]
        for key in gone:
            for shard, nodes in list(self.snapshots[key].tiers[tier].items()):
                for node in list(nodes):
                    self._held[node].discard((key, tier, shard))
                    self._take(node, key, tier, shard)
        self._still_complete((key, tier) for key in gone)

    def overwrite(self, tier: str, key: SnapshotKey) -> None:
        """Nodes write a snapshot to a tier, in the place of what an earlier generation took of that step."""
        self.forget_on(tier, lambda each: each.step == key.step and each != key)

    def recount(self) -> None:
        """Forget what is not whole; complete is what is whole on a tier."""
        whole = set(self.whole())
        self.forget(lambda key: key not in whole)
        for tier in self.complete:
            self.complete[tier] = sorted(key for key, snapshot in self.snapshots.items() if snapshot.whole_on(tier))

    def _take(self, node: int, key: SnapshotKey, tier: str, shard: int) -> None:
        """Remove one location. What is left of a snapshot may be nothing."""
        self.version += 1
        snapshot = self.snapshots[key]
        nodes = snapshot.tiers[tier][shard]
        snapshot.owners[tier] -= not nodes.pop(node).replica
        if not nodes:
            del snapshot.tiers[tier][shard]
        snapshot.copies[shard] -= 1
        if not snapshot.copies[shard]:
            del snapshot.copies[shard]
        if not snapshot.tiers[tier]:
            del snapshot.tiers[tier], snapshot.owners[tier]
        if not snapshot.tiers:
            del self.snapshots[key]

    def _still_complete(self, changed: Iterable[tuple[SnapshotKey, str]]) -> None:
        for key, tier in changed:
            if key in self.complete.get(tier, ()) and not self.whole_on(tier, key):
                self.complete[tier].remove(key)

    # -- what is there -------------------------------------------------------------------------------------------------

    def is_whole(self, key: SnapshotKey) -> bool:
        """Whether nodes that are there have every shard."""
        snapshot = self.snapshots.get(key)
        return snapshot is not None and snapshot.whole

    def whole_on(self, tier: str, key: SnapshotKey) -> bool:
        snapshot = self.snapshots.get(key)
        return snapshot is not None and snapshot.whole_on(tier)

    def on(self, tier: str) -> list[SnapshotKey]:
        """Every snapshot of which a tier has some shard."""
        return [key for key, snapshot in self.snapshots.items() if tier in snapshot.tiers]

    def whole(self) -> list[SnapshotKey]:
        """Every snapshot that is whole."""
        return [key for key, snapshot in self.snapshots.items() if snapshot.whole]

    def dispensable(self, key: SnapshotKey, nodes: Iterable[int], without: Iterable[int] = ()) -> list[int]:
        """Of these nodes, in their order, those without which a snapshot stays whole, also without the ones before.

        Args:
            without: nodes that are about to go in any case.
        """
        copies = Counter(self.snapshots[key].copies)
        for node in without:
            copies.subtract(self._shards(node, key))
        found = []
        for node in nodes:
            held = self._shards(node, key)
            if all(copies[shard] > count for shard, count in held.items()):
                copies.subtract(held)
                found.append(node)
        return found

    def _shards(self, node: int, key: SnapshotKey) -> Counter[int]:
        """The shards of a snapshot that a node holds, and on how many of its tiers."""
        return Counter(shard for each, _, shard in self._held.get(node, ()) if each == key)

    @property
    def newest(self) -> SnapshotKey | None:
        """The newest snapshot of which nodes that are there have every shard."""
        return max(self.whole(), default=None)
