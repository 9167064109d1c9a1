"""Retention: what daemons may forget. They forget nothing before they are told that something newer is complete.

A request to retain goes to all nodes, so it is worth waiting with: the end of a replication or of a job changes what is needed, but
the next snapshot sends what has changed anyway. It waits only while that snapshot has a free buffer.
"""

import msgspec

from checkpoint.protocol import Retain, SnapshotKey
from resilient.outbox import Outbox
from resilient.snapshots.catalog import Catalog
from resilient.snapshots.left_out import LeftOut
from resilient.snapshots.plan import StoragePlan
from resilient.snapshots.replication import Replication
from resilient.snapshots.transfers import Transfers


class Retention:
    """What daemons were told to retain.

    Invariants: while `holding`, nothing is sent; what the catalog lists on a tier is what daemons were told to retain there.

    Attributes:
        holding: daemons are to forget nothing: what they have reported is what the next generation may need.
    """

    def __init__(
        self, plan: StoragePlan, catalog: Catalog, left_out: LeftOut, replication: Replication, transfers: Transfers
    ) -> None:
        self.holding = True
        self._plan = plan
        self._memory = plan.memory.name
        self._keep_last = {tier.name: tier.keep_last for tier in plan.node_tiers}
        self._catalog = catalog
        self._left_out = left_out
        self._replication = replication
        self._transfers = transfers
        self._sent: dict[str, Retain] = {}

    def expects(self, tier: str, key: SnapshotKey) -> bool:
        """Whether daemons, by what they were told last, retain a snapshot on a tier."""
        if self.overwrites(tier, key):
            return False
        sent = self._sent.get(tier)
        if sent is None or key.step in sent.steps or key in self._written(tier):
            return True
        if key.generation > sent.generation:
            return True  # its daemons retain everything until they are told more; others do as they were told before
        return key.generation >= sent.generation and key.step > sent.upto and key.step not in sent.left_out

    def overwrites(self, tier: str, key: SnapshotKey) -> bool:
        """Whether another snapshot of the same step is being written to a tier, in the place of this one."""
        under_way = [each.key for each in (self._transfers.jobs.get(tier), self._replication.rounds.get(tier)) if each is not None]
        return any(each.step == key.step and each != key for each in under_way)

    def send(self, tier: str, generation: int, out: Outbox) -> None:
        """Tell all daemons what is needed of a tier."""
        if self.holding:
            return
        request = self._request(tier, generation)
        self._sent[tier] = request
        for node in self._catalog.addresses:
            out.request(node, request)
        self._catalog.forget_on(tier, lambda key: not self.expects(tier, key))
        self._transfers.prune()

    def send_to_new_daemon(self, node: int, out: Outbox) -> None:
        """A node's daemon is a new one, and retains everything until it is told what the others know."""
        if self.holding:
            return
        for tier, sent in self._sent.items():
            steps = {*sent.steps, *(key.step for key in self._written(tier))}
            out.request(node, msgspec.structs.replace(sent, steps=tuple(sorted(steps))))

    def send_if_short(self, tier: str, generation: int, out: Outbox) -> None:
        """Less may be needed of a tier than daemons were told: tell them now where they lack the room.

        Slower tiers are planned without room for what is not needed. In memory, the next snapshot needs a buffer.
        """
        sent = self._sent.get(tier)
        if sent is None or self.holding:
            return
        if tier != self._memory:
            if self._request(tier, generation) != sent:
                self.send(tier, generation, out)
            return
        # Daemons do not overwrite what they read.
        occupied = {*sent.steps, *(job.key.step for job in self._transfers.jobs.values())}
        if len(occupied) >= self._plan.buffers and not occupied.issubset(key.step for key in self._needed(tier)):
            self.send(tier, generation, out)

    def _request(self, tier: str, generation: int) -> Retain:
        steps = tuple(sorted({key.step for key in self._needed(tier)}))
        if tier == self._memory:
            left_out = tuple(sorted(self._left_out.steps))
            again = tuple(self._left_out.again.get(step, 0) for step in left_out) if self._left_out.again else ()
            return Retain(generation=generation, tier=tier, steps=steps, upto=self._left_out.upto, left_out=left_out, again=again)
        # Of a job that failed, some nodes may have done their part; it counts until something newer is whole.
        job, newest = self._transfers.jobs.get(tier), self._catalog.newest
        over = [key for key in self._catalog.on(tier) if job is None or key != job.key]
        upto = max((key.step for key in over if key in self._catalog.complete[tier] or (newest and key < newest)), default=0)
        return Retain(generation=generation, tier=tier, steps=steps, upto=upto)

    def _needed(self, tier: str) -> list[SnapshotKey]:
        """What is needed of a tier, the most important first; in memory, a buffer is left for the next snapshot."""
        complete = self._catalog.complete[tier][::-1]
        needed = complete[:1]
        if tier in self._replication.rounds:
            needed.append(self._replication.rounds[tier].key)
        if tier in self._replication.protected:
            needed.append(self._replication.protected[tier])
        needed += self._read() if tier == self._memory else self._written(tier)
        needed = list(dict.fromkeys([*needed, *complete[: self._keep_last[tier]]]))
        if tier != self._memory:
            return needed
        # What daemons were told to forget is never asked for again: one may have overwritten it, or be about to.
        listed = [key for key in needed if key in complete]
        return listed[: self._plan.buffers - 1]

    def _read(self) -> list[SnapshotKey]:
        """What is on its way to slower tiers, or waits for that."""
        return [*(job.key for job in self._transfers.jobs.values()), *self._transfers.pending.values()]

    def _written(self, tier: str) -> list[SnapshotKey]:
        """What is on its way to this tier. It may be of an earlier generation, of which nothing is retained by itself."""
        job = self._transfers.jobs.get(tier)
        return [job.key] if job is not None and job.unwanted is None else []
