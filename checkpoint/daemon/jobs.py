"""Jobs: on each tier one after the other, tried again until the tier is well or the job is not wanted any more.

Owns the tiers that the daemon writes to and the jobs on them; the bytes are in `checkpoint.daemon.transfers`.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential_jitter

from checkpoint import manifest, safe_dir
from checkpoint.daemon import transfers
from checkpoint.daemon.buffer_files import BufferSource
from checkpoint.daemon.buffers import Buffer, Use
from checkpoint.daemon.mounts import Mounts
from checkpoint.daemon.shards import Lookup, Root, Superseded, node_shard
from checkpoint.daemon.snapshots import Snapshots
from checkpoint.daemon.tasks import Tasks
from checkpoint.daemon.transfers import FlushedShard
from checkpoint.errors import (
    CheckpointError,
    DamagedCheckpoint,
    StaleGeneration,
    UnreachableCheckpoint,
    in_words,
    inodes_told_apart,
    naming,
)
from checkpoint.handshake import DAEMON_DAEMON
from checkpoint.manifest import Manifest
from checkpoint.marked import must_be_there
from checkpoint.protocol import (
    Committed,
    DaemonNews,
    DaemonSettings,
    Flushed,
    Held,
    JobFailed,
    JobKind,
    Replicate,
    StartJob,
    TierSettings,
    TierTrouble,
    TierWell,
)
from checkpoint.shard_manifest import ShardManifest
from checkpoint.tiers.copying import Cancelled, Copy
from checkpoint.tiers.pace import Pace

T = TypeVar("T")

HANG_S = 30.0
STALE_S = 1.0  # a job of a generation that is over is told as failed so much later
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 30.0
RELEASE_S = 10.0  # a tier that fails for so long keeps no buffer from newer snapshots


@dataclass(eq=False)
class Tier:
    """A tier that this daemon writes to.

    Attributes:
        root: None for that of the buffers, wherever those are: replicas lie beside them.
        turn: held by the job that runs; the others wait in the order in which they came.
        tasks: of its jobs.
        running: the job that runs.
        trouble_t: since when it cannot be written.
        flushed: what this node has flushed last, until it is committed: its buffer may hold something newer by then.
        buffer_lost: a job on it has lost its buffer to a newer snapshot, and none was done since; the next one keeps its own also
            where the tier hangs, or none would ever be done.

    Invariant: changed by the event loop alone; its one thread runs what jobs do.
    """

    name: str
    root: Path | None
    settings: TierSettings | None
    pace: Pace
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    tasks: Tasks = field(default_factory=Tasks)
    running: "TierJob | None" = None
    trouble_t: float | None = None
    flushed: FlushedShard | None = None
    buffer_lost: bool = False

    def check_mounted(self) -> None:
        """Raises FileNotFoundError where the file system is not mounted: what is made in its place would be hidden by it later."""
        mark = self.settings.mark if self.settings is not None else None
        if mark is not None and self.root is not None:
            must_be_there(self.root, *mark)


@dataclass(eq=False)
class TierJob:
    """A job that was accepted.

    Attributes:
        root: of the tier.
        buffer: pinned for it.
        released: the buffer was, because the tier does not work.
        cancelled: read by the threads that copy.
        progress_t: when it got on last; its threads write that and nothing else.
    """

    request: StartJob | Replicate
    kind: JobKind
    root: Path
    lookup: Lookup
    buffer: Buffer | None
    released: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    progress_t: float = 0.0

    def cancel(self) -> None:
        """It is not wanted any more. Called by the event loop."""
        self.cancelled.set()
        self.stopped.set()

    def progress(self, size_bytes: int) -> None:
        """So many bytes are written, or a file is done with. Called by any thread."""
        self.progress_t = time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait, but not longer than until it is cancelled."""
        try:
            await asyncio.wait_for(self.stopped.wait(), seconds)
        except TimeoutError:
            return


class Jobs:
    """The jobs of this node.

    Args:
        mounts: of the tiers; where one is gone, nothing is written.
        snapshots: whose buffers jobs read.
        report: takes news.

    Invariants: bookkeeping belongs to the event loop's thread. A buffer is pinned from the moment in which a job that reads it is
    accepted, for the next request may say that it is not needed; it is released where the tier has failed for `RELEASE_S` or hung
    for `HANG_S`. One that is leased is not read at all: a worker may have begun to overwrite it without having reported it.
    """

    def __init__(
        self, settings: DaemonSettings, mounts: Mounts, snapshots: Snapshots, report: Callable[[DaemonNews], None]
    ) -> None:
        self._node, self._mounts = settings.node, mounts
        self._key = settings.keys[DAEMON_DAEMON]
        self._snapshots = snapshots
        self._report = report
        self._tiers = {each.name: Tier(each.name, Path(each.path), each, Pace(each.max_bytes_per_s)) for each in settings.tiers}
        self._tiers[settings.memory] = Tier(settings.memory, None, None, Pace(None))
        self._node_roots = [Root(each.name, Path(each.path)) for each in settings.tiers if not each.durable]
        self._jobs: list[TierJob] = []

    def roots(self) -> list[Root]:
        """Where shards lie in directories of their own: beside the buffers (replicas, and what was left), and the node's tiers."""
        memory = self._snapshots.roots
        return [*(Root(self._snapshots.memory, root, self._snapshots.places.trusted(root)) for root in memory), *self._node_roots]

    def start(self, request: StartJob | Replicate) -> None:
        """Accept a job; its end is reported."""
        kind: JobKind = request.kind if isinstance(request, StartJob) else "replicate"
        tier = self._tiers.get(request.tier)
        if tier is None:
            self._report(self._failed(request, kind, f"node {self._node} has no tier {request.tier}"))
            return
        flushed = isinstance(request, StartJob) and request.kind == "commit" and self._flushed(tier, request) is not None
        buffer, leased = (None, False) if flushed else self._pin(request)  # to commit needs no bytes then
        lookup = self._lookup(buffer, leased=leased)
        job = TierJob(request, kind, tier.root or self._snapshots.buffers.root, lookup, buffer)
        self._jobs.append(job)
        tier.tasks.start(self._run(tier, job))

    def _lookup(self, buffer: Buffer | None, *, leased: bool) -> Lookup:
        source = BufferSource(buffer.files, buffer.held) if buffer is not None and buffer.held is not None else None
        return Lookup(self._node, source, leased, tuple(self.roots()))

    def _pin(self, request: StartJob | Replicate) -> tuple[Buffer | None, bool]:
        """The buffer that a job reads, pinned; and whether there is one that is leased and cannot be."""
        if isinstance(request, Replicate):
            return None, False  # it comes from another node
        buffer = self._snapshots.buffers.find(request.key)
        if buffer is None or buffer.held is None or buffer.held.node != request.shard:
            return None, False
        if buffer.use is not Use.IDLE:
            return None, True
        buffer.pins += 1
        return buffer, False

    def _pin_again(self, job: TierJob) -> None:
        """The buffer that a job has released, if no newer snapshot has taken it."""
        job.released = False
        job.buffer, _ = self._pin(job.request)
        job.lookup = self._lookup(job.buffer, leased=job.buffer is None)

    def _release(self, *jobs: TierJob) -> None:
        """Let the next snapshot have the buffers of jobs."""
        for job in jobs:
            if job.buffer is not None:
                job.buffer.pins -= 1
                job.buffer, job.released = None, True
                self._snapshots.released()

    def cancel(self, job_id: int) -> None:
        """A job is not wanted any more, whether it runs or waits for its turn."""
        for job in self._jobs:
            if job.request.job_id == job_id:
                job.cancel()

    def cancel_all(self) -> None:
        """No job is wanted any more."""
        for job in self._jobs:
            job.cancel()

    async def ended(self, tier: str, limit_s: float) -> bool:
        """Wait for the jobs on a tier, at most so long; whether all have ended."""
        return await self._tiers[tier].tasks.wait(limit_s)

    async def watch(self) -> None:
        """Report tiers on which a job does not get on, and let newer snapshots have the buffers that are read for them.

        A thread that waits in the kernel may go on reading such a buffer; it finds that it was overwritten (`BufferSource.check`).
        """
        while True:
            await asyncio.sleep(1.0)
            for tier in self._tiers.values():
                if tier.running is not None and time.monotonic() - tier.running.progress_t > HANG_S:
                    self._trouble(tier, f"nothing has been written for {HANG_S:.0f} s", None)
                    if not tier.buffer_lost:
                        self._release(*(job for job in self._jobs if job.request.tier == tier.name))

    def _flushed(self, tier: Tier, request: StartJob | Replicate) -> FlushedShard | None:
        """The shard of a request, where this node has flushed it last."""
        if tier.flushed is None:
            return None
        found = tier.flushed.manifest
        same = (found.step, found.generation, found.node) == (request.key.step, request.key.generation, request.shard)
        return tier.flushed if same else None

    async def _run(self, tier: Tier, job: TierJob) -> None:
        """One job after the other on each tier; what comes later waits."""
        async with tier.turn:
            if job.cancelled.is_set():
                news: DaemonNews = self._failed(job.request, job.kind, "cancelled", cancelled=True)
            else:
                tier.running = job
                news = await self._attempts(tier, job)
                tier.running = None
        self._jobs.remove(job)
        self._report(news)
        self._release(job)

    async def _attempts(self, tier: Tier, job: TierJob) -> DaemonNews:
        """Do a job again and again until it is done, or cannot be, or is not wanted any more; its news."""

        def troubled(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            detail, number = (in_words(error), error.errno) if isinstance(error, OSError) else (f"{error}", None)
            began = self._trouble(tier, detail, number)
            if time.monotonic() >= began + RELEASE_S:
                self._release(job)

        attempts = AsyncRetrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_exponential_jitter(multiplier=FIRST_RETRY_S, max=LAST_RETRY_S),
            sleep=job.sleep,
            stop=lambda state: job.cancelled.is_set(),
            before_sleep=troubled,
            reraise=True,
        )
        try:
            news: DaemonNews = await attempts(self._attempt, tier, job)
        except (CheckpointError, OSError, Cancelled, ValueError) as error:
            if isinstance(error, StaleGeneration):  # the fence is up, and the generation that it is for begins in a moment
                await job.sleep(STALE_S)
            cancelled = job.cancelled.is_set()
            if job.released and isinstance(error, DamagedCheckpoint | ValueError):
                tier.buffer_lost = True
                error = Superseded(f"the buffer of step {job.request.key.step} was needed for a newer snapshot")
            return self._failed(job.request, job.kind, "cancelled" if cancelled else f"{error}", cancelled=cancelled, error=error)
        tier.buffer_lost = False
        if tier.trouble_t is not None:
            down_s = time.monotonic() - tier.trouble_t
            self._report(TierWell(generation=self._snapshots.generation, tier=tier.name, down_s=down_s))
            tier.trouble_t = None
        return news

    async def _attempt(self, tier: Tier, job: TierJob) -> DaemonNews:
        """One attempt, in the tier's thread; its news. Raises what `transfers` does."""
        if job.cancelled.is_set():
            raise Cancelled
        if job.released:
            self._pin_again(job)
        began = time.monotonic()
        job.progress_t = began
        if isinstance(job.request, Replicate) or job.kind == "copy":
            held, target = await self._in_thread(tier, lambda: self._hold(tier, job))
            shard = node_shard(tier.name, target, held, replica=job.kind == "replicate")
            write_s = time.monotonic() - began
            return Held(generation=self._snapshots.generation, shard=shard, job_id=job.request.job_id, write_s=write_s)
        if job.kind == "flush":
            return await self._flush(tier, job, job.request, began)
        return await self._commit(tier, job, job.request, began)

    async def _in_thread(self, tier: Tier, work: Callable[[], T]) -> T:
        root = tier.root or self._snapshots.buffers.root

        def told() -> T:
            with inodes_told_apart(), naming(root):
                return work()

        return await asyncio.get_running_loop().run_in_executor(tier.pool, told)

    def _hold(self, tier: Tier, job: TierJob) -> tuple[ShardManifest, Path]:
        self._mounts.check(job.root)
        safe_dir.make_private(job.root, trusted=self._snapshots.places.trusted(job.root))
        transfer = Copy(tier.pace, job.cancelled, job.progress)
        try:
            if isinstance(job.request, Replicate):
                return transfers.replicate(job.request, self._key, job.root, transfer)
            return transfers.copy(job.request, job.lookup, job.root, transfer)
        except FileNotFoundError:
            self._mounts.check(job.root)  # which says more than the name of a file
            raise

    async def _flush(self, tier: Tier, job: TierJob, request: StartJob, began: float) -> DaemonNews:
        def work() -> FlushedShard:
            tier.check_mounted()
            return transfers.flush(request, job.lookup, job.root, Copy(tier.pace, job.cancelled, job.progress))

        tier.flushed = await self._in_thread(tier, work)
        return Flushed(
            generation=self._snapshots.generation,
            job_id=request.job_id,
            tier=tier.name,
            key=request.key,
            shard=request.shard,
            size_bytes=tier.flushed.manifest.size_bytes,
            write_s=time.monotonic() - began,
        )

    async def _commit(self, tier: Tier, job: TierJob, request: StartJob, began: float) -> DaemonNews:
        flushed, settings = self._flushed(tier, request), tier.settings
        if settings is None:
            raise CheckpointError(f"nothing can be committed on {tier.name}")

        def work() -> Manifest:
            tier.check_mounted()
            transfer = Copy(tier.pace, job.cancelled, job.progress)
            return transfers.commit(request, job.lookup, flushed, job.root, settings.keep_last, settings.keep_every, transfer)

        contents = await self._in_thread(tier, work)
        tier.flushed = None
        return Committed(
            generation=self._snapshots.generation,
            job_id=request.job_id,
            tier=tier.name,
            key=request.key,
            shard=request.shard,
            size_bytes=contents.size_bytes + len(manifest.encode(contents)),
            files=len(contents.files) + 1,
            write_s=time.monotonic() - began,
        )

    def _failed(
        self,
        request: StartJob | Replicate,
        kind: JobKind,
        reason: str,
        *,
        cancelled: bool = False,
        error: Exception | None = None,
    ) -> JobFailed:
        return JobFailed(
            generation=self._snapshots.generation,
            kind=kind,
            job_id=request.job_id,
            tier=request.tier,
            key=request.key,
            shard=request.shard,
            reason=reason,
            cancelled=cancelled,
            unreachable=isinstance(error, UnreachableCheckpoint),
            superseded=isinstance(error, Superseded) and not self._snapshots.buffers.holds(request.key),
        )

    def _trouble(self, tier: Tier, detail: str, number: int | None) -> float:
        """Report that a tier does not work, once; since when, by the monotonic clock."""
        if tier.trouble_t is None:
            tier.trouble_t = time.monotonic()
            self._report(TierTrouble(generation=self._snapshots.generation, tier=tier.name, detail=detail, errno=number))
        return tier.trouble_t
