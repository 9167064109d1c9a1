"""The daemon's event loop: requests come from the agent, reports from the workers, and each goes to whom it concerns.

Owns the process's pipes and sockets, and the order in which requests are carried out.
"""

import asyncio
import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from checkpoint import safe_dir
from checkpoint.daemon import shards
from checkpoint.daemon.endpoint import Endpoint
from checkpoint.daemon.jobs import Jobs
from checkpoint.daemon.mounts import Mounts
from checkpoint.daemon.outlet import Outlet
from checkpoint.daemon.server import Server
from checkpoint.daemon.snapshots import Snapshots
from checkpoint.daemon.tasks import Tasks
from checkpoint.framing import LINE_LIMIT_BYTES, Decoder, NotAMessage
from checkpoint.handshake import DAEMON_DAEMON
from checkpoint.naming import step_path
from checkpoint.protocol import (
    BeginSession,
    Cancel,
    Clear,
    Cleared,
    DaemonRequest,
    DaemonSettings,
    Discard,
    Inventory,
    Listening,
    NodeShard,
    Replicate,
    Retain,
    StartJob,
    Sync,
    Synced,
    TakeInventory,
    TierSettings,
)
from checkpoint.shard_manifest import ShardManifest
from checkpoint.worker_news import WorkerNews

log = logging.getLogger(__name__)

T = TypeVar("T")

DATAGRAM_BYTES = 1 << 18
LAST_WORDS_S = 1.0
WATCH_S = 1.0  # between two looks whether workers reach this daemon
TIER_S = 20.0  # for a tier that is read, or forgotten from: one that hangs must not cost what is in memory
MEMORY_S = 1.5  # for what is under way in memory at the end: the driver kills agents that have not ended in 3 s


class Daemon:
    """The snapshot daemon of one node.

    Invariants: requests are carried out in the order in which they came; one that needs all workers' reports to be dealt with
    waits for that. News carry the generation of the present session. What is no message is refused in one line of log.
    """

    def __init__(self, settings: DaemonSettings, outlet: Outlet) -> None:
        self._settings = settings
        self._directory = Path(settings.directory)
        self._endpoint = Endpoint(self._directory)
        self._outlet = outlet
        written = [*settings.places, *(tier.path for tier in settings.tiers if not tier.durable)]
        self._mounts = mounts = Mounts(self._directory, settings.keys[DAEMON_DAEMON], map(Path, written))
        self._snapshots = Snapshots(settings, mounts, self._endpoint, outlet.report)
        self._jobs = Jobs(settings, mounts, self._snapshots, outlet.report)
        self._forgetting = Tasks()
        self._threads: defaultdict[Path, ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1, thread_name_prefix="tier"))
        self._swept = False
        self._watching = Tasks()
        self._clearing = False
        self._workers: Decoder[WorkerNews] = Decoder(WorkerNews)
        self._address = ""

    async def run(self, stdin: int) -> None:
        """Work until the standard input ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._endpoint.inbox, self._receive)
        settings = self._settings
        roots = [*settings.places, *(tier.path for tier in settings.tiers if not tier.durable)]
        port = Server([Path(root) for root in roots], settings.keys).start(settings.host)
        self._address = f"{settings.host}:{port}"
        self._outlet.report(Listening(generation=self._snapshots.generation, address=self._address))
        self._watching.start(self._jobs.watch())
        self._watching.start(self._watch_endpoint())
        reader = asyncio.StreamReader(limit=LINE_LIMIT_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(stdin, "rb", buffering=0))
        requests: Decoder[DaemonRequest] = Decoder(DaemonRequest)
        while True:
            try:
                line = await reader.readline()
                if not line:
                    return
                request = requests.decode(line)
            except ValueError as error:  # NotAMessage, or a line that is too long
                log.warning("refused: %s", error)
                continue
            await self._on_request(request)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _on_request(self, request: DaemonRequest) -> None:
        match request:
            case BeginSession():
                await self._settle()
                await self._snapshots.begin(request)
            case TakeInventory():
                await self._settle()
                found = await self._take_inventory()
                generation = self._snapshots.generation
                self._outlet.report(Inventory(generation=generation, address=self._address, shards=tuple(found)))
            case Retain():
                self._retain(request)
            case Discard():
                self._discard(request)
            case StartJob() | Replicate():
                self._jobs.start(request)
            case Cancel():
                self._jobs.cancel(request.job_id)
            case Sync():
                await self._settle()
                self._outlet.report(Synced(generation=self._snapshots.generation))
            case Clear():
                await self._clear(request)
            case DaemonSettings():
                log.warning("refused: settings for a daemon that has some")

    async def _settle(self) -> None:
        """Until what the workers have reported by now is dealt with, and what was to be forgotten is gone."""
        self._receive()
        await self._snapshots.settle()
        if not await self._forgetting.wait(TIER_S):
            log.warning("a tier does not answer, and what is not needed there any more stays for now")
            self._forgetting = Tasks()  # it is waited for once

    async def _take_inventory(self) -> list[NodeShard]:
        """Every shard that is here."""
        buffers = self._snapshots.buffers
        buffers.rescan()
        memory = self._snapshots.memory
        found = [shards.node_shard(memory, step_path(buffers.root, step), held) for step, held in buffers.held().items()]
        sweeps, self._swept = not self._swept, True  # no job was begun before the first inventory

        def look(root: shards.Root) -> list[NodeShard]:
            if sweeps:
                shards.sweep([root])
            return shards.inventory([root])

        reading = {asyncio.create_task(self._in_thread(root, partial(look, root))): root for root in self._jobs.roots()}
        await asyncio.wait(reading, timeout=TIER_S)
        for task, root in reading.items():
            if task.done():
                found += task.result()
            else:
                log.warning("tier %s does not answer, and counts as empty: %s", root.tier, root.path)
        return found

    async def _in_thread(self, root: shards.Root, work: Callable[[], T]) -> T:
        """Each root has a thread of its own: one that hangs takes none from others, however often it is tried."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[root.path], work)

    def _retain(self, request: Retain) -> None:
        steps = frozenset(request.steps)
        left_out = dict(zip_longest(request.left_out, request.again[: len(request.left_out)], fillvalue=0))

        def needed(shard: ShardManifest) -> bool:
            if shard.step in steps:
                return True
            if shard.generation < request.generation or shard.step <= request.upto:
                return False
            # A step that is taken again counts, and whoever asked to leave it out may not have known of that.
            return shard.step not in left_out or self._snapshots.taken_again(shard) > left_out[shard.step]

        if request.tier == self._snapshots.memory:
            self._snapshots.retain(needed)
        self._forget([root for root in self._jobs.roots() if root.tier == request.tier], needed)

    def _discard(self, request: Discard) -> None:
        def needed(shard: ShardManifest) -> bool:
            return shard.step <= request.step or shard.generation > request.invalid_generation

        self._snapshots.discard(needed)
        self._forget(self._jobs.roots(), needed)

    def _forget(self, roots: list[shards.Root], needed: Callable[[ShardManifest], bool]) -> None:
        for root in roots:
            self._forgetting.start(self._in_thread(root, partial(shards.forget, [root], needed)))

    async def _clear(self, request: Clear) -> None:
        """Delete what is on these tiers, each once nothing is under way that would make something again there.

        Memory first, which waits for no other tier: the agent may be killed before those have answered.
        """
        self._clearing = True
        self._outlet.outlive_reader()
        self._jobs.cancel_all()
        memory = self._snapshots.memory
        if memory in request.tiers:
            await asyncio.gather(self._jobs.ended(memory, MEMORY_S), self._snapshots.end(MEMORY_S))
            roots = self._snapshots.roots
            await self._snapshots.clear()
            for root in roots:
                _remove_empty(root.parent)
        safe_dir.remove(self._directory)
        others = [tier for tier in self._settings.tiers if tier.name in request.tiers and not tier.durable]
        await asyncio.gather(*(self._clear_tier(tier) for tier in others))
        self._outlet.report(Cleared(generation=self._snapshots.generation))

    async def _clear_tier(self, tier: TierSettings) -> None:
        if not await self._jobs.ended(tier.name, TIER_S):
            log.warning("tier %s does not answer, and what is being copied there may stay", tier.name)
        await asyncio.to_thread(safe_dir.remove, Path(tier.path))
        _remove_empty(Path(tier.path).parent)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Deal with every datagram that is there."""
        while True:
            try:
                data = self._endpoint.inbox.recv(DATAGRAM_BYTES)
            except BlockingIOError:
                return
            try:
                news = self._workers.decode(data)
            except NotAMessage as error:
                log.warning("a worker's report is refused: %s", error)
                continue
            self._snapshots.on_worker(news)

    async def _watch_endpoint(self) -> None:
        """Report that workers do not reach this daemon, because its files were deleted, and make these anew."""
        while not self._clearing:
            if missing := self._endpoint.missing():
                self._reopen(missing)
            await asyncio.sleep(WATCH_S)

    def _reopen(self, missing: list[str]) -> None:
        where = f"{', '.join(missing)} in {self._directory}, where the ranks of this node reach the snapshot daemon"
        if self._endpoint.taken:
            self._snapshots.begin_trouble(f"{where}: another process has taken the place", None)
            return
        self._receive()  # what was sent before
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._endpoint.inbox)
        try:
            self._endpoint.restore()
        except OSError as error:
            self._snapshots.begin_trouble(f"deleted: {where}; it cannot be made anew: {error.strerror or error}", error.errno)
        else:
            self._mounts.keep()
            by = "an epilog, RemoveIPC of logind or somebody else clears that directory"
            self._snapshots.begin_trouble(f"deleted: {where}; it is made anew, but {by}", errno.ENOENT)
            self._snapshots.released()  # buffers that could not be made meanwhile
        loop.add_reader(self._endpoint.inbox, self._receive)


def _remove_empty(path: Path) -> None:
    """Remove what held only what was removed before it."""
    with suppress(OSError):
        path.rmdir()
        if path.parent.name.startswith("resilient-"):
            path.parent.rmdir()
