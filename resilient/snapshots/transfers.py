"""Transfers: what is complete in memory goes on to the tiers that want it, one job at a time on each tier, the newest first.

To the durable tier it goes in two rounds: a step counts only once every shard is flushed and one node has committed it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from checkpoint.protocol import Cancel, JobFailed, JobKind, SnapshotKey, StartJob
from resilient.outbox import Outbox
from resilient.snapshots.catalog import Catalog
from resilient.snapshots.durable import Durable
from resilient.snapshots.plan import StoragePlan
from resilient.snapshots.tier_health import Faults

ATTEMPTS = 3
"""Of a step on a tier, until it is given up there."""


class Unwanted(Enum):
    """Why a job is to end without success."""

    LOST = "a node was lost"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass
class TransferJob:
    """One snapshot on its way to one tier.

    Attributes:
        sources: of each shard the node that transfers it.
        waiting: for these shards.
        shards_of: the shards that a node transfers.
        began_t: unix seconds.
        size_bytes, stall_s: of the snapshot.
        unwanted: why it ends without success, and `reason` in words.
        troubled: a node has trouble with the tier since it began.
    """

    job_id: int
    tier: str
    key: SnapshotKey
    kind: Literal["copy", "flush", "commit"]
    sources: dict[int, int]
    waiting: set[int]
    began_t: float
    size_bytes: int
    stall_s: float
    shards_of: dict[int, list[int]] = field(default_factory=dict)
    unwanted: Unwanted | None = None
    reason: str = ""
    troubled: bool = False


class Transfers:
    """The jobs, and what waits for one.

    Invariants: a tier has at most one job; a job is listed only while some shard of it is waited for; of a tier, at most one
    snapshot waits.

    Attributes:
        jobs: by tier.
        pending: by tier the snapshot that comes next.
    """

    def __init__(self, plan: StoragePlan, catalog: Catalog, durable: Durable, faults: Faults, job_ids: Iterator[int]) -> None:
        self.jobs: dict[str, TransferJob] = {}
        self.pending: dict[str, SnapshotKey] = {}
        self._plan = plan
        self._catalog = catalog
        self._durable = durable
        self._faults = faults
        self._job_ids = job_ids
        self._failures: dict[tuple[str, SnapshotKey], int] = {}

    # -- what is to be transferred -------------------------------------------------------------------------------------

    def begin(self, generation: int, out: Outbox) -> None:
        """A generation begins: what was under way starts anew, on its behalf."""
        for tier, job in self.jobs.items():
            if tier not in self.pending or job.key > self.pending[tier]:
                self.pending[tier] = job.key
            for node in self._catalog.addresses:
                out.request(node, Cancel(generation=generation, job_id=job.job_id))
        self.jobs = {}

    def want(self, key: SnapshotKey, tiers: Iterable[str], generation: int, out: Outbox) -> None:
        """A snapshot that is complete in memory is to go to these tiers, instead of what does not get on there.

        A commit is called off, too: one that fails would be tried again without end. One that is being made is made, and told.
        """
        for tier in self._plan.slower_tiers:
            if tier.name not in tiers:
                continue
            self.pending[tier.name] = key
            job = self.jobs.get(tier.name)
            if job is not None and job.troubled:
                self._cancel(job, Unwanted.SUPERSEDED, generation, out)

    def want_durable(self, key: SnapshotKey) -> None:
        """A snapshot is to become durable, whatever else waits for that."""
        tier = self._plan.durable.name
        job = self.jobs.get(tier)
        if job is None or job.key != key:
            self.pending[tier] = key

    def cancel(self, keys: Iterable[SnapshotKey], generation: int, out: Outbox) -> None:
        """What is on its way of these snapshots is not wanted any more."""
        for job in self.jobs.values():
            if job.key in keys:
                self._cancel(job, Unwanted.SUPERSEDED, generation, out)

    def prune(self) -> None:
        """Let go what is known of snapshots that are not there any more."""
        self.pending = {tier: key for tier, key in self.pending.items() if key in self._catalog.snapshots}
        self._failures = {(tier, key): n for (tier, key), n in self._failures.items() if key in self._catalog.snapshots}

    def failures(self, tier: str, key: SnapshotKey) -> int:
        """How often a snapshot could not be brought to a tier."""
        return self._failures.get((tier, key), 0)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def schedule(self, generation: int, now: float, out: Outbox) -> None:
        """Start what can be started."""
        for tier in self._plan.slower_tiers:
            if tier.name in self.pending and tier.name not in self.jobs:
                key = self._next(tier.name, self.pending.pop(tier.name))
                if key is not None:
                    self._start(tier.name, key, generation, now, out)

    def _next(self, tier: str, key: SnapshotKey) -> SnapshotKey | None:
        """The snapshot that was asked for, or the newest in its place; None where nothing of use can be done."""
        if not self._catalog.is_whole(key):
            complete = self._catalog.complete[self._plan.memory.name]
            if not complete:
                return None
            key = max(complete)
        if tier == self._plan.durable.name:
            return key if key.step > self._durable.step else None
        if key in self._catalog.complete[tier]:
            return None
        snapshot = self._catalog.snapshots[key]
        if len(snapshot.own(self._plan.memory.name)) < snapshot.shards:
            return None  # what is left of it are replicas, and those lie where they are to lie
        return key

    def _start(self, tier: str, key: SnapshotKey, generation: int, now: float, out: Outbox) -> None:
        snapshot = self._catalog.snapshots[key]
        kind: Literal["copy", "flush"] = "flush" if tier == self._plan.durable.name else "copy"
        if kind == "copy":
            self._catalog.overwrite(tier, key)
        sources = snapshot.sources()
        job = TransferJob(
            job_id=next(self._job_ids),
            tier=tier,
            key=key,
            kind=kind,
            sources=sources,
            waiting=set(sources),
            began_t=now,
            size_bytes=snapshot.size_bytes,
            stall_s=snapshot.stall_s,
        )
        self.jobs[tier] = job
        for shard, node in sources.items():
            job.shards_of.setdefault(node, []).append(shard)
            self._request(job, shard, generation, out)

    def _request(self, job: TransferJob, shard: int, generation: int, out: Outbox) -> None:
        request = StartJob(generation=generation, kind=job.kind, job_id=job.job_id, tier=job.tier, key=job.key, shard=shard)
        out.request(job.sources[shard], request)

    def _cancel(self, job: TransferJob, why: Unwanted, generation: int, out: Outbox, *, reason: str = "") -> None:
        """End a job without success, unless it is ending so already."""
        if job.unwanted is not None:
            return
        job.unwanted, job.reason = why, reason or why.value
        for shard in job.waiting:
            out.request(job.sources[shard], Cancel(generation=generation, job_id=job.job_id))

    # -- how they end --------------------------------------------------------------------------------------------------

    def troubled(self, tier: str) -> None:
        """A node has trouble with a tier: what is on its way there may be superseded."""
        if tier in self.jobs:
            self.jobs[tier].troubled = True

    def well(self, tier: str) -> None:
        """No node has trouble with a tier any more: what is on its way there gets on."""
        if tier in self.jobs:
            self.jobs[tier].troubled = False

    def on_done(self, kind: JobKind, job_id: int, tier: str, shard: int, generation: int, out: Outbox) -> TransferJob | None:
        """A node has done its shard; the job, if it is over."""
        job = self._job(kind, job_id, tier, shard)
        if job is None:
            return None
        job.waiting.discard(shard)
        if not job.waiting and job.kind == "flush" and job.unwanted is None:
            self._commit(job, generation, out)
        return self._over(job)

    def is_waited_for(self, news: JobFailed) -> bool:
        """Whether they are news of a job that is under way."""
        return self._job(news.kind, news.job_id, news.tier, news.shard) is not None

    def on_failed(self, news: JobFailed, generation: int, out: Outbox) -> TransferJob | None:
        """A node has ended its shard without success; the job, if it is over."""
        job = self._job(news.kind, news.job_id, news.tier, news.shard)
        if job is None:
            return None
        job.waiting.discard(news.shard)
        why = Unwanted.CANCELLED if news.cancelled else Unwanted.SUPERSEDED if news.superseded else Unwanted.FAILED
        self._cancel(job, why, generation, out, reason=news.reason)
        return self._over(job)

    def lost(self, node: int, generation: int, out: Outbox) -> None:
        """A node is gone: what it was to transfer is to come from somebody else."""
        for job in list(self.jobs.values()):
            gone = job.waiting.intersection(job.shards_of.get(node, ()))
            if gone:
                job.waiting -= gone
                self._cancel(job, Unwanted.LOST, generation, out)
                if self._over(job) is not None:
                    self.again(job)

    def new_daemon(self, node: int, generation: int, out: Outbox) -> list[TransferJob]:
        """A node's daemon is a new one: it is told once more what it has to do. The jobs that are over by that."""
        over = []
        for job in list(self.jobs.values()):
            for shard in job.shards_of.get(node, ()):
                if shard not in job.waiting:
                    continue
                if job.unwanted is None:
                    self._request(job, shard, generation, out)
                else:
                    job.waiting.discard(shard)
                    if self._over(job) is not None:
                        over.append(job)
        return over

    def again(self, job: TransferJob) -> None:
        """A job is over and its tier still wants the snapshot, unless it has something newer to wait for."""
        self.pending.setdefault(job.tier, job.key)

    def give_up_or_again(self, node: int, job: TransferJob, generation: int, out: Outbox) -> None:
        """A job that is over was not successful."""
        if job.unwanted is Unwanted.LOST:
            self.again(job)
        elif job.unwanted is Unwanted.FAILED and job.key in self._catalog.snapshots:
            failures = self._failures[(job.tier, job.key)] = self.failures(job.tier, job.key) + 1
            if failures < ATTEMPTS:
                self.again(job)
            else:
                detail = f"step {job.key.step} is given up: {job.reason}"
                self._faults.report([node], job.tier, detail, generation, out, step=job.key.step)

    def _job(self, kind: JobKind, job_id: int, tier: str, shard: int) -> TransferJob | None:
        """The job that waits for this."""
        job = self.jobs.get(tier)
        waits = job is not None and (job.job_id, job.kind) == (job_id, kind) and shard in job.waiting
        return job if waits else None

    def _commit(self, job: TransferJob, generation: int, out: Outbox) -> None:
        """Second round, of the first shard's node, which knows what it has flushed."""
        if job.sources[0] not in self._catalog.addresses:
            job.unwanted = Unwanted.LOST
            return
        job.kind, job.waiting = "commit", {0}
        self._request(job, 0, generation, out)

    def _over(self, job: TransferJob) -> TransferJob | None:
        """The job, without a place in the list, where nothing of it is waited for."""
        if job.waiting:
            return None
        del self.jobs[job.tier]
        return job
