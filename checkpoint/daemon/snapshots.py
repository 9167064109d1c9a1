"""Taking snapshots: buffers are leased to the workers, and sealed once every rank has copied its state into one.

Owns the session, the lease and the buffers; what it decides it decides in the thread of the event loop.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoint.daemon.buffer_places import BufferPlaces
from checkpoint.daemon.endpoint import Endpoint
from checkpoint.daemon.mounts import Mounts
from checkpoint.daemon.session import Session
from checkpoint.daemon.shards import node_shard
from checkpoint.daemon.tasks import Tasks
from checkpoint.naming import step_path
from checkpoint.protocol import (
    BeginSession,
    DaemonNews,
    DaemonSettings,
    Held,
    NoRoom,
    Skipped,
    SnapshotKey,
    Stale,
    TierTrouble,
    TierWell,
)
from checkpoint.shard_manifest import ShardManifest
from checkpoint.tiers import blueprint
from checkpoint.tiers.blueprint import Blueprint
from checkpoint.tiers.lease import Lease
from checkpoint.worker_news import (
    BufferBroken,
    LayoutAnnounced,
    LayoutWriteFailed,
    LeasePassed,
    StateCopied,
    StepSkipped,
    WorkerNews,
)

log = logging.getLogger(__name__)

SEAL_THREADS = 2
ENOUGH = 2  # buffers: one holds what is needed, and the other takes what comes next


class Snapshots:
    """The snapshots that the workers of this node take.

    Args:
        mounts: of the places of buffers.
        endpoint: where the workers are told of leases.
        report: takes news.

    Attributes:
        places: where the buffers may lie.

    Invariants: at most one buffer is leased. While workers may use a lease it is not taken back; it ends when all ranks are done
    with it, or with the session. After every await it is looked again whether the session is still the present one: what was
    prepared for the workers before is never leased to others.
    """

    def __init__(self, settings: DaemonSettings, mounts: Mounts, endpoint: Endpoint, report: Callable[[DaemonNews], None]) -> None:
        self.memory = settings.memory
        self._directory, self._endpoint = Path(settings.directory), endpoint
        self.places = BufferPlaces(settings, mounts)
        self._count = settings.buffers
        self._generation = settings.generation
        self._report = report
        self._lease = Lease(settings.generation, endpoint.lease.number, None)
        self._publish(None)  # what the daemon before this one has leased is not known here
        self.buffers = self.places.open()
        self._session: Session | None = None
        self._preparing = asyncio.Lock()
        self._work = Tasks()
        self._sealing = Tasks()
        self._seal_pool = ThreadPoolExecutor(SEAL_THREADS, thread_name_prefix="seal")
        self._last: ShardManifest | None = None
        self._broken_t: float | None = None  # since when snapshots cannot be written into buffers

    @property
    def generation(self) -> int:
        """On whose behalf the daemon speaks."""
        return self._generation

    @property
    def roots(self) -> list[Path]:
        """Where shards of snapshots lie."""
        return [*self.places.left(self.buffers.root), self.buffers.root]

    # -- the session ---------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Until everything that the workers have reported by now is sealed or skipped."""
        await self._sealing.wait()

    async def begin(self, request: BeginSession) -> None:
        """A generation begins; no worker of the one before is alive, or `renew` is set."""
        self._session, self._last, self._generation = None, None, request.generation
        self._endpoint.begin()
        self._publish(None)
        self.buffers.begin()
        if request.renew:
            await self.buffers.renew()
        ranks = frozenset(range(request.first_rank, request.first_rank + request.ranks))
        session = self._session = Session(request.generation, request.node_rank, request.nodes, ranks)
        for rank in ranks:  # announced before this daemon listened, or before it knew of the session
            found = blueprint.announced(self._directory, rank)
            if found is not None and found.generation == session.generation:
                session.layouts[rank] = found.digest
        self._announced(session)

    def retain(self, needed: Callable[[ShardManifest], bool]) -> None:
        """Which shards in buffers may not be overwritten."""
        self.buffers.retain(needed)
        self.released()

    def released(self) -> None:
        """Less is needed, or read by jobs, than before: there may be room for what the workers write now."""
        session = self._session
        if session is not None and session.digest and (self.buffers.misfits or not session.ready):
            self._work.start(self._prepare(session))
        self.offer()

    def taken_again(self, shard: ShardManifest) -> int:
        """How often the present workers have taken its step again after it was left out."""
        session = self._session
        return session.again.get(shard.step, 0) if session is not None and shard.generation == session.generation else 0

    def discard(self, needed: Callable[[ShardManifest], bool]) -> None:
        """Forget at once what is in buffers and not needed."""
        for held in self.buffers.held().values():
            if not needed(held):
                self.buffers.forget(held.step)
        self.offer()

    async def end(self, limit_s: float) -> None:
        """No more snapshots are taken; what is being made or sealed is waited for, but not longer than so."""
        self._session = None
        self._publish(None)
        await asyncio.gather(self._work.wait(limit_s), self._sealing.wait(limit_s))

    async def clear(self) -> None:
        """Give the memory back, before a slower place, which may hang, is waited for."""
        await self.places.clear(self.buffers.root)
        await self.buffers.clear()

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _announced(self, session: Session) -> None:
        """Once all workers have announced that they will write the same arrays, buffers are made for these."""
        digests = set(session.layouts.values())
        if session.layouts.keys() == session.ranks and len(digests) == 1 and not session.digest:
            (session.digest,) = digests
            self._work.start(self._prepare(session))

    def _layout_changed(self, session: Session) -> None:
        """The workers write something else from now on. All of them have agreed on that, and none uses what is leased to it."""
        session.digest, session.ready = "", False
        for step in list(session.copied):
            self._skip(session, step, "what is saved has changed")
        index = self._lease.buffer
        self._publish(None)
        if index is not None:
            self.buffers.give_back(index)
        self.buffers.pause()

    async def _prepare(self, session: Session) -> None:
        """Make buffers for what the workers have announced, in the first place that has room."""
        async with self._preparing:
            digest = session.digest
            if session is not self._session or not digest:
                return
            try:
                plan = session.plan = await self._read_plan(session, digest)
            except blueprint.LayoutChanged:
                return  # the rank announces it next, and buffers are made once all have
            except (OSError, ValueError) as error:
                if self._is_wanted(session, digest):
                    self.begin_trouble(f"what the workers will write cannot be read: {error}", getattr(error, "errno", None))
                return
            if plan.place is not None and session is self._session:
                session.shard, session.shards = plan.place
            for place in self.places.all if self.buffers.empty else []:
                try:
                    await self._make_buffers(session, digest, place, plan)
                except OSError as error:
                    if session is self._session and not self.buffers.empty:
                        break
                    self._trouble(f"no buffers in {place}: {error.strerror or error}", error.errno)
                    if session is self._session:
                        await self.buffers.remove_empty()
                    continue
                return
            if session is self._session and not self.buffers.empty:
                await self._make_others(session, digest, plan)
                return
            if session is self._session:
                places = tuple(str(place) for place in self.places.all)
                self._report(NoRoom(generation=self._generation, size_bytes=plan.size_bytes * self._count, places=places))

    async def _read_plan(self, session: Session, digest: str) -> Blueprint:
        """What the workers have written down; where that was deleted, what was read of it before. Raises OSError, ValueError."""
        try:
            return await asyncio.to_thread(blueprint.read, self._directory, digest, session.ranks)
        except FileNotFoundError:
            if session.plan is None or not blueprint.is_of(session.plan.digest, digest):
                raise
            return session.plan

    async def _make_buffers(self, session: Session, digest: str, place: Path, plan: Blueprint) -> None:
        """Make all buffers that are free, then lease one; less where something else was announced meanwhile. Raises OSError."""
        await asyncio.to_thread(self.places.make, place)
        if session is self._session and place != self.buffers.root:
            self.buffers = self.places.buffers(place)
        while self._is_wanted(session, digest) and await self.buffers.make_one(plan):
            pass
        self._use(session, digest, plan)

    async def _make_others(self, session: Session, digest: str, plan: Blueprint) -> None:
        """Make buffers while some hold what is needed: where these are, or where that has no room, in a slower place."""
        root = self.buffers.root
        try:
            await self._make_buffers(session, digest, root, plan)
            return
        except OSError as error:
            if session is not self._session:
                return
            enough = session.ready and self.buffers.fitting(plan) >= ENOUGH
            idle = self.buffers.idle
            if idle and not enough:
                await self.buffers.remove_empty()
            self.begin_trouble(f"no buffers in {root}: {error.strerror or error}", error.errno)
        if enough or not idle:
            return  # some are in use, or are read: it is tried again when they are not, or when less is needed
        for place in self.places.slower(root):
            try:
                await self._move(session, digest, place, plan)
            except OSError as error:
                log.warning("no buffers in %s either: %s", place, error.strerror or error)
                continue
            return

    async def _move(self, session: Session, digest: str, place: Path, plan: Blueprint) -> None:
        """Make all buffers in another place, and then leave those that there are. Raises OSError."""
        await asyncio.to_thread(self.places.make, place)
        others = self.places.buffers(place)
        try:
            while self._is_wanted(session, digest) and await others.make_one(plan):
                pass
        except OSError:
            await others.remove_empty()
            raise
        if not self._is_wanted(session, digest):
            await others.remove_empty()
        elif self.buffers.idle:
            before, self.buffers = self.buffers, others
            self.places.leave(before.root)
            await before.leave()
            self._use(session, digest, plan)

    def _use(self, session: Session, digest: str, plan: Blueprint) -> None:
        """Lease the buffers that were made, if the workers still write what they are for."""
        if self._is_wanted(session, digest):
            self._endpoint.point(self.buffers.root)
            self.buffers.use(plan)
            session.ready = True
            self.offer()

    def _is_wanted(self, session: Session, digest: str) -> bool:
        """Whether the present workers write arrays with this digest."""
        return session is self._session and session.digest == digest

    def offer(self) -> None:
        """Lease a buffer, if none is leased and there is one."""
        if self._session is None or self._lease.buffer is not None:
            return
        index = self.buffers.lease()
        if index is not None:
            self._session.done = set()
            self._publish(index)

    def _publish(self, index: int | None) -> None:
        self._lease = Lease(self._generation, self._lease.number + 1, index)
        self._endpoint.publish(self._lease)

    # -- workers -------------------------------------------------------------------------------------------------------

    def on_worker(self, news: WorkerNews) -> None:
        """A rank reports. What is of another generation is dropped."""
        session = self._session
        if session is None or news.generation != session.generation or news.rank not in session.ranks:
            return
        match news:
            case LayoutAnnounced():
                if session.digest not in ("", news.digest):
                    self._layout_changed(session)
                session.layouts[news.rank] = news.digest
                self._announced(session)
            case LayoutWriteFailed():
                self.begin_trouble(f"rank {news.rank} cannot say what it will write: {news.reason}", news.errno)
            case StateCopied():
                self._copied(session, news)
            case StepSkipped():
                if session.counts(news.step, news.again):
                    self._skip(session, news.step, news.reason, news.wants)
            case LeasePassed():
                self._passed(session, news.rank, news.lease)
            case BufferBroken():
                self._broken(session, news)

    def _copied(self, session: Session, news: StateCopied) -> None:
        if not self._is_leased(news.lease):
            if session.counts(news.step, news.again):
                self._skip(session, news.step, "it was copied for a snapshot daemon before this one", news.wants)
            return
        session.done.add(news.rank)
        if session.counts(news.step, news.again) and news.step not in session.skipped:
            session.copied.setdefault(news.step, {})[news.rank] = news
        self._finish_lease(session, news.step)

    def _passed(self, session: Session, rank: int, lease: int) -> None:
        """A rank does without a lease."""
        if self._is_leased(lease):
            session.done.add(rank)
            self._finish_lease(session, None)

    def _broken(self, session: Session, news: BufferBroken) -> None:
        """A rank could not write into the buffer that is leased."""
        if self._is_leased(news.lease) and self._lease.buffer is not None:
            self._remake(self._lease.buffer, news.reason, news.errno)
            self._skip(session, news.step, news.reason)
            self._passed(session, news.rank, news.lease)

    def _is_leased(self, lease: int) -> bool:
        return lease == self._lease.number and self._lease.buffer is not None

    def _finish_lease(self, session: Session, step: int | None) -> None:
        """Once all ranks are done with the lease: its buffer holds this step of all of them, or nothing of use."""
        index = self._lease.buffer
        if session.done != session.ranks or index is None:
            return
        self._publish(None)
        mine = session.copied.pop(step, {}) if step is not None else {}
        for other in list(session.copied):
            self._skip(session, other, "ranks took other steps")
        if step is not None and mine.keys() == session.ranks:
            self._sealing.start(self._seal(session, index, step, mine))
            self.offer()
            return
        self.buffers.give_back(index)
        if step is not None:
            wants = {name for news in mine.values() for name in news.wants}
            self._skip(session, step, "a rank left it out", sorted(wants))
        self.released()  # it may have broken, and is made anew before it is leased again

    def _remake(self, index: int, why: str, number: int | None) -> None:
        """A buffer is not there any more, or has no room for one more page: it is made anew where that is needed."""
        self.begin_trouble(why, number)
        self.buffers.doubt(index)
        if self._session is not None and self._session.digest:
            self._work.start(self._prepare(self._session))

    def begin_trouble(self, why: str, number: int | None) -> None:
        """Report that snapshots cannot be taken, once, until one is sealed again."""
        if self._broken_t is None:
            self._broken_t = time.monotonic()
            self._trouble(why, number)

    def _trouble(self, detail: str, number: int | None) -> None:
        self._report(TierTrouble(generation=self._generation, tier=self.memory, detail=detail, errno=number))

    def _skip(self, session: Session, step: int, reason: str, wants: Sequence[str] = ()) -> None:
        copied = session.copied.pop(step, {})
        if step not in session.skipped:
            session.skipped.add(step)
            wanted = tuple(sorted({*wants, *(name for news in copied.values() for name in news.wants)}))
            again = session.again.get(step, 0)
            self._report(Skipped(generation=session.generation, step=step, reason=reason, again=again, wants=wanted))

    async def _seal(self, session: Session, index: int, step: int, copied: Mapping[int, StateCopied]) -> None:
        began = time.monotonic()
        key = SnapshotKey(step, session.generation)
        buffers = self.buffers
        try:
            held = await buffers.seal(index, key, session.shard, session.shards, self._seal_pool)
        except (OSError, ValueError) as error:
            if buffers is self.buffers:
                self._remake(index, f"{error}", error.errno if isinstance(error, OSError) else errno.EIO)
            self._skip(session, step, f"{error}")
            self.offer()
            return
        if self._broken_t is not None:
            self._report(TierWell(generation=self._generation, tier=self.memory, down_s=time.monotonic() - self._broken_t))
            self._broken_t = None
        changed = any(news.changed for news in copied.values())
        if changed and self._last is not None and self._last.step != step and self._last.chunks == held.chunks:
            buffers.forget(step)
            self._report(Stale(generation=session.generation, step=step, before=self._last.step))
        else:
            self._last = held
            self._report(
                Held(
                    generation=session.generation,
                    shard=node_shard(self.memory, step_path(buffers.root, step), held),
                    stall_s=max(news.stall_s for news in copied.values()),
                    write_s=time.monotonic() - began,
                    wants=tuple(sorted({name for news in copied.values() for name in news.wants})),
                    again=max(news.again for news in copied.values()),
                )
            )
        self.offer()
