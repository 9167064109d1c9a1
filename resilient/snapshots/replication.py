"""Replication: every node's shard is fetched by its buddy, so that the loss of a node costs no snapshot.

No copy is made where every shard is on two nodes already, because their ranks hold the same of the state.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from checkpoint.protocol import Cancel, JobFailed, Replicate, SnapshotKey
from resilient.outbox import Outbox
from resilient.snapshots.catalog import Catalog
from resilient.snapshots.plan import StoragePlan
from resilient.snapshots.tier_health import Faults


def buddies(nodes: int, domains: Sequence[str] | None = None) -> tuple[int | None, ...]:
    """Of each node the one that keeps its replicas, in another failure domain where there is one; None for a single node.

    Every node keeps about as many replicas as any other. Where each node is its own domain, the buddy is the next one around.
    """
    names = list(domains) if domains is not None else [str(node) for node in range(nodes)]
    if nodes == 1:
        return (None,)
    members: dict[str, list[int]] = {}
    for node, name in enumerate(names):
        members.setdefault(name, []).append(node)
    around = [node for group in members.values() for node in group]
    largest = max(members.values(), key=len)
    found = [0] * nodes
    if len(members) == 1 or 2 * len(largest) <= nodes:
        # Nodes of a domain follow each other around the ring: as many places on as the largest domain has, another one begins.
        distance = 1 if len(members) == 1 else len(largest)
        for place, node in enumerate(around):
            found[node] = around[(place + distance) % nodes]
        return tuple(found)
    elsewhere = [node for node in around if names[node] != names[largest[0]]]  # fewer than half
    for node, buddy in zip(largest, itertools.cycle(elsewhere), strict=False):
        found[node] = buddy
    for node, buddy in zip(elsewhere, largest, strict=False):
        found[node] = buddy
    return tuple(found)


@dataclass
class Round:
    """The replication of one snapshot on one tier.

    Attributes:
        sent: of each shard the number of the job, and the nodes it goes from and to.
        waiting: for these shards.
        of_node: the shards that go from or to a node.
    """

    key: SnapshotKey
    tier: str
    sent: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    of_node: dict[int, list[int]] = field(default_factory=dict)
    failed: bool = False

    @property
    def cause(self) -> str:
        """Under which the faults of the round are counted."""
        return f"replicas of {self.tier} {self.key.step}.{self.key.generation}"


class Replication:
    """What is on its way to buddies, one snapshot at a time on each tier.

    Invariant: a tier has a round only while some shard of it is waited for.

    Attributes:
        rounds: by tier.
        protected: by tier the newest snapshot of which the buddies have all shards.
    """

    def __init__(self, plan: StoragePlan, catalog: Catalog, faults: Faults, job_ids: Iterator[int]) -> None:
        self.rounds: dict[str, Round] = {}
        self.protected: dict[str, SnapshotKey] = {}
        self._plan = plan
        self._tiers = {tier.name for tier in plan.node_tiers if tier.replicas}
        self._catalog = catalog
        self._faults = faults
        self._job_ids = job_ids
        self._members: tuple[int, ...] = ()
        self._buddies: tuple[int | None, ...] = ()
        self._unprotected: dict[str, SnapshotKey] = {}  # what buddies could not get hold of
        self._unreached: set[int] = set()  # shards whose node did not answer its buddy the last time

    def begin(self, members: tuple[int, ...], generation: int, out: Outbox, domains: Sequence[str] = ()) -> None:
        """A generation of these nodes begins. Args: domains: of each, as the fabric tells; the config's count before them."""
        for each in self.rounds.values():
            self._close(each, generation, out)
        self.rounds, self.protected, self._unprotected, self._unreached = {}, {}, {}, set()
        own = [self._plan.domains[node] for node in members] if self._plan.domains else domains
        if members != self._members:
            self._members, self._buddies = members, buddies(len(members), own or None)

    def resumed(self) -> None:
        """The generation goes on: what buddies have from before stays protected, until they have something newer."""
        for tier in self._tiers:
            found = [key for key, snapshot in self._catalog.snapshots.items() if snapshot.replicated_on(tier)]
            if found:
                self.protected[tier] = max(found)

    def start(self, tier: str, generation: int, out: Outbox) -> None:
        """Let the buddies fetch the newest snapshot that is complete on a tier, unless they are at another one."""
        complete = self._catalog.complete[tier]
        if tier not in self._tiers or tier in self.rounds or not complete or len(self._members) == 1:
            return
        key = complete[-1]
        if key in (self.protected.get(tier), self._unprotected.get(tier)):
            return
        if not self._catalog.addresses.keys() >= set(self._members):
            return  # a member is gone, and the generation with it
        snapshot = self._catalog.snapshots[key]
        if snapshot.replicated_on(tier):
            self._protect(key, tier, out)
            return
        own = snapshot.own(tier)
        places = {node: place for place, node in enumerate(self._members)}
        alone = snapshot.shards == len(self._members)  # each node has a shard of its own
        if any(node not in places or (alone and places[node] != shard) for shard, (node, _) in own.items()):
            return  # of other nodes than those of today, who will soon have something newer
        self._catalog.overwrite(tier, key)
        found = self.rounds[tier] = Round(key, tier)
        for shard, (node, location) in own.items():
            place = self._buddies[places[node]]
            assert place is not None
            buddy, job_id = self._members[place], next(self._job_ids)
            found.sent[shard] = (job_id, node, buddy)
            found.waiting.add(shard)
            found.of_node.setdefault(node, []).append(shard)
            found.of_node.setdefault(buddy, []).append(shard)
            address = self._catalog.addresses[node]
            out.request(
                buddy,
                Replicate(
                    generation=generation,
                    job_id=job_id,
                    tier=tier,
                    key=key,
                    shard=shard,
                    address=address,
                    directory=location.directory,
                ),
            )

    def on_held(self, tier: str, shard: int, job_id: int | None, generation: int, out: Outbox) -> bool:
        """A buddy has a shard; whether the round is over."""
        return self._ended(tier, shard, job_id, generation, out, failed=False)

    def on_failed(self, node: int, news: JobFailed, generation: int, out: Outbox) -> bool:
        """A buddy could not get a shard; whether the round is over."""
        found = self._round(news.tier, news.shard, news.job_id)
        if found is None:
            return False
        # Of a node that does not answer once, its own loss tells soon enough.
        if not news.cancelled and (not news.unreachable or news.shard in self._unreached):
            detail = f"the replica of shard {news.shard} of step {news.key.step}: {news.reason}"
            self._faults.report_one_of_many(found.cause, node, news.tier, detail, generation, out, step=news.key.step)
        if news.unreachable and not news.cancelled:
            self._unreached.add(news.shard)
        return self._ended(news.tier, news.shard, news.job_id, generation, out, failed=True)

    def lost(self, node: int, generation: int, out: Outbox) -> list[str]:
        """A node is gone; the tiers whose rounds are over by that."""
        return self._without(node, generation, out, cancel=True)

    def new_daemon(self, node: int, generation: int, out: Outbox) -> list[str]:
        """A node's daemon is a new one, which knows of no job; the tiers whose rounds are over by that."""
        return self._without(node, generation, out, cancel=False)

    def _without(self, node: int, generation: int, out: Outbox, *, cancel: bool) -> list[str]:
        over = []
        for tier, each in list(self.rounds.items()):
            for shard in each.of_node.get(node, ()):
                job_id, source, buddy = each.sent[shard]
                if cancel and node == source and shard in each.waiting:
                    # A buddy would wait long for one that does not answer, and all that comes later with it.
                    out.request(buddy, Cancel(generation=generation, job_id=job_id))
                if self._ended(tier, shard, job_id, generation, out, failed=True):
                    over.append(tier)
        return over

    def _round(self, tier: str, shard: int, job_id: int | None) -> Round | None:
        """The round that waits for this job."""
        found = self.rounds.get(tier)
        waits = found is not None and shard in found.waiting and found.sent[shard][0] == job_id
        return found if waits else None

    def _ended(self, tier: str, shard: int, job_id: int | None, generation: int, out: Outbox, *, failed: bool) -> bool:
        found = self._round(tier, shard, job_id)
        if found is None:
            return False
        found.waiting.discard(shard)
        found.failed |= failed
        if found.waiting:
            return False
        del self.rounds[tier]
        self._close(found, generation, out)
        # A node that is gone by now had copies, too, which were there when it was asked for others.
        snapshot = self._catalog.snapshots.get(found.key)
        if found.failed or snapshot is None or not snapshot.replicated_on(tier):
            self._unprotected[tier] = found.key
        else:
            self._protect(found.key, tier, out)
        return True

    def _protect(self, key: SnapshotKey, tier: str, out: Outbox) -> None:
        self._unreached.clear()
        self.protected[tier] = key
        out.event("replicated", {"step": key.step, "tier": tier}, key.generation)

    def _close(self, found: Round, generation: int, out: Outbox) -> None:
        detail = f"replicas of step {found.key.step} could not be made"
        self._faults.close(found.cause, found.tier, detail, generation, out, step=found.key.step)
