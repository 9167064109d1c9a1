"""Snapshots: the state machine of all that becomes of snapshots, without input or output.

News of the nodes' daemons go in (`checkpoint.protocol`), requests to daemons and events go to the outbox. This module dispatches,
and owns the order in which things follow from each other; what is known is owned by the parts.
"""

import itertools
from collections.abc import Sequence

from checkpoint.protocol import (
    Committed,
    DaemonNews,
    Flushed,
    Held,
    Inventory,
    JobFailed,
    JobKind,
    Listening,
    Skipped,
    SnapshotKey,
    Stale,
    TierTrouble,
    TierWell,
)
from resilient.outbox import Outbox
from resilient.recovery.rollback import InvalidationRule
from resilient.snapshots.candidates import Candidates
from resilient.snapshots.catalog import Catalog
from resilient.snapshots.durable import Durable
from resilient.snapshots.invalidation import Invalidation
from resilient.snapshots.left_out import LeftOut
from resilient.snapshots.plan import StoragePlan
from resilient.snapshots.replication import Replication
from resilient.snapshots.retention import Retention
from resilient.snapshots.tier_health import Faults, TierHealth
from resilient.snapshots.transfers import ATTEMPTS, TransferJob, Transfers

STALE_STEPS = 4
"""Of which faults are counted at the same time."""


class Snapshots:
    """See the module. `now` is unix seconds.

    Invariant: the work for one message of a daemon does not depend on the number of nodes, except where a snapshot becomes complete
    on a tier, is replicated or committed, where a step is left out, and where a job starts or is cancelled.
    """

    def __init__(self, plan: StoragePlan) -> None:
        self.plan = plan
        self._generation = 0
        self._members: tuple[int, ...] = ()
        self._resumed = False  # in this job: it is known what it goes on from
        job_ids = itertools.count(1)
        self._faults = Faults()
        self._catalog = Catalog(plan)
        self._candidates = Candidates(self._catalog, [tier.name for tier in plan.node_tiers])
        self._durable = Durable(plan)
        self._invalidation = Invalidation(plan.invalidated, self._catalog)
        self._left_out = LeftOut()
        self._replication = Replication(plan, self._catalog, self._faults, job_ids)
        self._transfers = Transfers(plan, self._catalog, self._durable, self._faults, job_ids)
        self._retention = Retention(plan, self._catalog, self._left_out, self._replication, self._transfers)
        self._health = TierHealth(self._faults)
        self._stale: list[int] = []  # the steps whose faults are being counted
        self._missed_by_tier: dict[str, tuple[int, int]] = {}  # the newest step that it was to have and has not, and their number

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def inventory(self, node: int, news: Inventory) -> None:
        """All that a node holds, as it was asked; whatever was known of it before is forgotten.

        The answer is of after all that its daemon was told before, so while daemons may forget nothing, all of it counts.
        """
        self._replace(node, news, with_forgotten=self._retention.holding)

    def lost(self, node: int, out: Outbox) -> None:
        """A node is gone, with what it holds, for as long as it does not return."""
        self._catalog.lose(node)
        self._health.gone(node, self._generation, self._left_out.decided, out)
        self._transfers.lost(node, self._generation, out)
        for tier in self._replication.lost(node, self._generation, out):
            self._on_replicated(tier, out)

    def _replace(self, node: int, news: Inventory, *, with_forgotten: bool) -> None:
        """What daemons were told to forget is not counted, although it may still be listed, unless `with_forgotten`.

        Nor is what they were told to write something else in the place of: they may be about to.
        """
        self._catalog.listen(node, news.address)
        valid = [shard for shard in news.shards if not self._invalidation.covers(shard.key)]
        if len(valid) < len(news.shards):
            self._invalidation.reappeared()
        there = [each for each in valid if not self._retention.overwrites(each.tier, each.key)]
        self._catalog.replace(node, [each for each in there if with_forgotten or self._retention.expects(each.tier, each.key)])

    def address(self, node: int) -> str | None:
        """Where a node's snapshot daemon listens, host:port; None if that is not known."""
        return self._catalog.addresses.get(node)

    def candidates(self) -> bytes:
        """What workers may go on from, packed by `resilient.protocol.candidates.pack`; the same for all nodes."""
        return self._candidates.packed()

    # -- generations ---------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Let daemons forget nothing until the next generation goes on: what they say they have is what it may need."""
        self._retention.holding = True

    def begin(self, generation: int, members: Sequence[int], out: Outbox, domains: Sequence[str] = ()) -> None:
        """A generation of these nodes, by node rank, begins; all have sent their inventories.

        What was under way starts anew, on its behalf.

        Args:
            domains: failure domain of each, as the fabric tells; the config's count where it names any.
        """
        self._generation, self._members = generation, tuple(members)
        self._retention.holding = True
        self._left_out.begin()
        self._report_stale(out)
        self._transfers.begin(generation, out)
        self._replication.begin(self._members, generation, out, domains)
        self._catalog.recount()
        self._transfers.prune()

    def resumed(self, step: int, now: float, out: Outbox) -> None:
        """The workers go on from this step: what is newer belongs to a past that was left, or was found damaged."""
        self._left_out.decide(step)
        self._resumed, self._retention.holding = True, False
        self._catalog.forget(lambda key: key.step > step and key.generation < self._generation)
        self._transfers.prune()
        self._replication.resumed()
        self._durable.roll_back(step)
        self._transfers.schedule(self._generation, now, out)  # first, so that daemons do not forget what they are to write
        for tier in self.plan.node_tiers:
            self._retention.send(tier.name, self._generation, out)

    # -- what is invalid -----------------------------------------------------------------------------------------------

    def roll_back(self, step: int, reason: str, out: Outbox) -> None:
        """What was computed beyond a step is invalid, whoever holds it; it is removed before the next generation begins."""
        self._invalidation.add(self._generation, step)
        covered = sorted(filter(self._invalidation.covers, self._catalog.snapshots))
        for key in covered:
            snapshot = self._catalog.snapshots[key]
            if snapshot.whole:
                tier = next(each.name for each in self.plan.node_tiers if each.name in snapshot.tiers)
                out.event("checkpoint_rejected", {"step": key.step, "tier": tier, "reason": reason}, self._generation)
        moving = {job.key for job in self._transfers.jobs.values()}
        self._transfers.cancel(set(filter(self._invalidation.covers, moving)), self._generation, out)
        self._catalog.forget(self._invalidation.covers)
        self._transfers.prune()
        self._durable.roll_back(step)

    def invalidated_due(self) -> tuple[InvalidationRule, ...]:
        """What must be quarantined on the durable tier before the next start; nothing where that was done."""
        return self._invalidation.due()

    def quarantine_done(self, out: Outbox) -> None:
        """What was due is quarantined on the durable tier; the daemons discard theirs."""
        self._invalidation.done(self._generation, out)

    # -- news ----------------------------------------------------------------------------------------------------------

    def on_news(self, node: int, news: DaemonNews, now: float, out: Outbox) -> None:
        """News of a node's daemon."""
        match news:
            case Listening():
                self._catalog.listen(node, news.address)
            case Inventory():
                self._on_new_daemon(node, news, now, out)
            case Held():
                self._on_held(node, news, now, out)
            case Skipped():
                self._on_skipped(node, news.step, news.generation, out, again=news.again)
                for tier in news.wants if news.generation == self._generation else ():
                    self._missed(tier, news.step, news.reason, out)
            case Stale():
                self._on_stale(node, news, out)
            case Flushed():
                self._on_done(node, "flush", news.job_id, news.tier, news.shard, now, out)
            case Committed():
                self._on_committed(node, news, now, out)
            case JobFailed():
                self._on_failed(node, news, now, out)
            case TierTrouble():
                self._transfers.troubled(news.tier)
                self._health.on_trouble(node, news, self._generation, out)
            case TierWell():
                self._health.on_well(node, news, self._generation, self._left_out.decided, out)
                if not self._health.troubled(news.tier):
                    self._transfers.well(news.tier)
            case _:
                pass

    def _on_new_daemon(self, node: int, news: Inventory, now: float, out: Outbox) -> None:
        """A daemon was started anew: what it does not have by now it will never have, and it is told again what it has to do."""
        generation, memory = self._generation, self.plan.memory.name
        self._replace(node, news, with_forgotten=False)  # what it is to forget may be on its way to it
        self._health.gone(node, generation, self._left_out.decided, out)
        here = {each.key.step for each in news.shards if not each.replica and each.key.generation == generation}
        if node in self._members and self._left_out.on_absent(here):
            self._retention.send(memory, generation, out)
        self._retention.send_to_new_daemon(node, out)
        for tier in self._replication.new_daemon(node, generation, out):
            self._on_replicated(tier, out)
        for job in self._transfers.new_daemon(node, generation, out):
            self._on_ended(node, job, now, out)
        for key in sorted(self._catalog.snapshots):  # the news of its last shard may have died with the daemon before
            self._maybe_completed(key, now, out)

    def _on_held(self, node: int, news: Held, now: float, out: Outbox) -> None:
        shard = news.shard
        tier, key = shard.tier, shard.key
        known = node in self._catalog.addresses and self._catalog.fits(shard) and not self._invalidation.covers(key)
        if shard.replica:
            if known and self._retention.expects(tier, key):
                self._catalog.add(node, shard)
            if self._replication.on_held(tier, shard.shard, news.job_id, self._generation, out):
                self._on_replicated(tier, out)
        elif news.job_id is not None:
            if known and self._retention.expects(tier, key):
                self._catalog.add(node, shard)
            self._on_done(node, "copy", news.job_id, tier, shard.shard, now, out)
        elif known and tier == self.plan.memory.name:
            self._on_taken(node, news, now, out)

    def _on_taken(self, node: int, news: Held, now: float, out: Outbox) -> None:
        """Workers of a node have copied their state into a buffer, and it is sealed."""
        shard, key = news.shard, news.shard.key
        if key.generation == self._generation:
            again = bool(news.again) and key.step in self._left_out.steps
            if self._left_out.on_held(node, key.step, again=news.again) or again:
                self._retention.send(shard.tier, self._generation, out)
            if key.step in self._left_out.steps:
                return  # too late: others have been told that it is not needed, and may hold something else by now
        if not self._retention.expects(shard.tier, key):
            return
        snapshot = self._catalog.add(node, shard)
        snapshot.stall_s = max(snapshot.stall_s, news.stall_s)
        snapshot.write_s = max(snapshot.write_s, news.write_s)
        snapshot.wants |= frozenset(news.wants)
        self._maybe_completed(key, now, out)

    def _on_skipped(self, node: int, step: int, generation: int, out: Outbox, *, again: int = 0) -> None:
        if generation == self._generation and self._left_out.on_skipped(node, step, again=again):
            self._retention.send(self.plan.memory.name, generation, out)

    def _missed(self, tier: str, step: int, reason: str, out: Outbox) -> None:
        """A slower tier does without a step that it was to have. The first is told, the second, the fourth, the eighth."""
        newest, count = self._missed_by_tier.get(tier, (0, 0))
        if tier != self.plan.memory.name and step > newest:
            self._missed_by_tier[tier] = step, count + 1
            if not count & (count + 1):
                fields = {"step": step, "tier": tier, "reason": reason, "count": count + 1}
                out.event("checkpoint_missed", fields, self._generation)

    def _on_stale(self, node: int, news: Stale, out: Outbox) -> None:
        if news.step not in self._stale:
            self._report_stale(out, beyond=STALE_STEPS - 1)
            self._stale.append(news.step)
        self._on_skipped(node, news.step, news.generation, out)
        detail = f"step {news.step} carries the same bytes as step {news.before} although training went on: refused"
        tier, generation = self.plan.memory.name, self._generation
        self._faults.report_one_of_many(f"stale {news.step}", node, tier, detail, generation, out, step=news.step)

    def _report_stale(self, out: Outbox, *, beyond: int = 0) -> None:
        """Write the faults of stale steps that were only counted so far, but not those of so many steps that came last."""
        while len(self._stale) > beyond:
            step = self._stale.pop(0)
            detail = f"step {step} carries the same bytes as the one before"
            self._faults.close(f"stale {step}", self.plan.memory.name, detail, self._generation, out, step=step)

    # -- what is complete ----------------------------------------------------------------------------------------------

    def _maybe_completed(self, key: SnapshotKey, now: float, out: Outbox) -> None:
        """Every node's shard of a step of this generation may be in memory, also where several nodes have the same one."""
        memory = self.plan.memory.name
        if key.generation == self._generation and key.step > self._left_out.upto:
            snapshot = self._catalog.snapshots.get(key)
            if snapshot is not None and snapshot.owners.get(memory) == len(self._members):
                self._completed(memory, key, snapshot.write_s, now, out)

    def _completed(self, tier: str, key: SnapshotKey, write_s: float, now: float, out: Outbox) -> None:
        """Every node's shard of a step is on a tier: requests go to all nodes now, and what was to be sent waited for it."""
        snapshot = self._catalog.snapshots[key]
        self._catalog.completed(tier, key)
        self._snapshot_event(tier, key, snapshot.size_bytes, snapshot.stall_s, write_s, out)
        if tier == self.plan.memory.name:
            self._left_out.decide(key.step)
            self._report_stale(out)
            for name, older in self._transfers.pending.items():
                if name in snapshot.wants and older != key:
                    late = "a newer one was due before its turn came"
                    self._missed(name, older.step, "the tier does not work" if self._health.troubled(name) else late, out)
            self._transfers.want(key, snapshot.wants, self._generation, out)
        self._transfers.schedule(self._generation, now, out)  # first, so that daemons do not overwrite what they are to read
        self._retention.send(tier, self._generation, out)  # before the replicas, which take the place of what is forgotten
        self._replication.start(tier, self._generation, out)

    def _snapshot_event(self, tier: str, key: SnapshotKey, size_bytes: int, stall_s: float, write_s: float, out: Outbox) -> None:
        fields = {"step": key.step, "tier": tier, "bytes": size_bytes}
        out.event("snapshot", {**fields, "stall_s": round(stall_s, 6), "write_s": round(write_s, 4)}, key.generation)

    def _on_replicated(self, tier: str, out: Outbox) -> None:
        """A round of replication is over: what waited for that is not needed, and something newer may be replicated."""
        self._retention.send_if_short(tier, self._generation, out)
        self._replication.start(tier, self._generation, out)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _on_done(self, node: int, kind: JobKind, job_id: int, tier: str, shard: int, now: float, out: Outbox) -> None:
        job = self._transfers.on_done(kind, job_id, tier, shard, self._generation, out)
        if job is not None:
            self._on_ended(node, job, now, out)

    def _on_committed(self, node: int, news: Committed, now: float, out: Outbox) -> None:
        job = self._transfers.on_done("commit", news.job_id, news.tier, news.shard, self._generation, out)
        if job is None:
            return
        if not self._invalidation.covers(job.key):  # else it counts, whatever it was called off for: it is there
            took_s = max(1e-3, now - job.began_t)
            self._durable.commit(job.key.step, news.size_bytes, took_s)
            self._snapshot_event(job.tier, job.key, job.size_bytes, job.stall_s, took_s, out)
            fields = {"step": job.key.step, "tier": job.tier, "bytes": news.size_bytes, "files": news.files}
            out.event("committed", fields, self._generation)
        self._on_ended(node, job, now, out)

    def _on_failed(self, node: int, news: JobFailed, now: float, out: Outbox) -> None:
        if news.kind == "replicate":
            if self._replication.on_failed(node, news, self._generation, out):
                self._on_replicated(news.tier, out)
            return
        if news.superseded and self._transfers.is_waited_for(news):  # else the same job would be tried again without end
            self._catalog.remove(node, news.key, self.plan.memory.name, news.shard)
            self._missed(news.tier, news.key.step, "its buffer was needed for a newer snapshot", out)
        job = self._transfers.on_failed(news, self._generation, out)
        if job is not None:
            self._on_ended(node, job, now, out)

    def _on_ended(self, node: int, job: TransferJob, now: float, out: Outbox) -> None:
        """A job is over; its tier takes the next one."""
        if job.unwanted is not None:
            self._transfers.give_up_or_again(node, job, self._generation, out)
        elif job.kind == "copy":
            if self._catalog.whole_on(job.tier, job.key):
                self._completed(job.tier, job.key, now - job.began_t, now, out)
            else:  # a node was lost after it had copied its shard
                self._transfers.again(job)
        self._transfers.schedule(self._generation, now, out)
        if job.kind == "copy" and job.unwanted is not None:
            self._retention.send_if_short(job.tier, self._generation, out)
        self._retention.send_if_short(self.plan.memory.name, self._generation, out)

    # -- what others ask -----------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> list[int]:
        """The steps that can be gone on from, ascending."""
        return sorted({key.step for key in self._catalog.whole()}.union(self._durable.steps))

    @property
    def beginning(self) -> bool:
        """Whether no checkpoint was ever given up for a newer one, so that to start over loses no more than they do."""
        return self._durable.beginning

    @property
    def may_start_without_fence(self) -> bool:
        """Whether there is a snapshot to go on from, although the durable tier cannot be written."""
        return bool(self._catalog.whole())

    @property
    def newest(self) -> SnapshotKey | None:
        """The newest snapshot of which nodes that are there have every shard."""
        return self._catalog.newest

    def dispensable(self, nodes: Sequence[int], without: Sequence[int] = ()) -> list[int]:
        """Of these nodes, in their order, those that may go, also with the ones before: the newest snapshot is durable or stays
        whole. Args: without: nodes that are about to go in any case.
        """
        newest = self.newest
        if newest is None or newest.step <= self.durable_step:
            return list(nodes)
        return self._catalog.dispensable(newest, nodes, without)

    @property
    def durable_step(self) -> int:
        """The newest step that is committed; 0: none."""
        return self._durable.step

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Of the last transfer to the durable tier; None before the first."""
        return self._durable.rate_bytes_per_s

    @rate_bytes_per_s.setter
    def rate_bytes_per_s(self, rate_bytes_per_s: float | None) -> None:
        self._durable.rate_bytes_per_s = rate_bytes_per_s

    @property
    def behind(self) -> bool:
        """Whether something newer than what is durable is held."""
        newest = self.newest
        return newest is not None and newest.step > self.durable_step

    @property
    def troubled(self) -> bool:
        """Whether the durable tier does not work at present."""
        return self._health.troubled(self.plan.durable.name)

    def cost(self, key: SnapshotKey) -> tuple[int, float]:
        """Bytes of a snapshot, and the seconds that training stood still for it. Raises KeyError where nobody holds it."""
        snapshot = self._catalog.snapshots[key]
        return snapshot.size_bytes, snapshot.stall_s

    def silent_daemon(self, node: int, detail: str, action: str, out: Outbox) -> None:
        """A node's daemon does not answer, and something is done about it."""
        self._health.on_silence(node, self.plan.memory.name, detail, action, self._generation, out)

    # -- the end -------------------------------------------------------------------------------------------------------

    def save_newest(self, now: float, out: Outbox) -> None:
        """Make the newest snapshot durable, whatever the cadence."""
        newest = self.newest
        if newest is not None and newest.step > self.durable_step:
            self._transfers.want_durable(newest)
            self._transfers.schedule(self._generation, now, out)

    def given_up(self) -> bool:
        """Whether the newest snapshot cannot be made durable: it was tried often enough."""
        newest = self.newest
        return newest is not None and self._transfers.failures(self.plan.durable.name, newest) >= ATTEMPTS

    def superseded(self, *, ended: bool) -> list[str]:
        """The tiers that hold nothing that is needed: memory, and at the end of a campaign the nodes' other tiers too.

        What nodes hold that are not there may complete what others hold. Before ranks have gone on from somewhere, nobody knows
        whether the newest durable checkpoint is sound, and all that is held is kept; a script that keeps nothing there never says
        that its ranks have gone on.

        Args:
            ended: no job goes on from here.
        """
        if any(not self._resumed or key.step > self.durable_step for key in self._catalog.snapshots):
            return []
        return [self.plan.memory.name, *(tier.name for tier in self.plan.others if ended)]
