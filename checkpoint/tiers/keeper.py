"""The keeper: a process of a node that holds its snapshots. It outlives the workers, and is started anew when it dies.

Commands come as JSON lines on the standard input, news goes as JSON lines to the standard output; workers say by datagrams what
they have copied; other nodes' keepers read over TCP. What is decided for all nodes (when a step is whole, what is flushed next,
what may be forgotten) is decided by whoever commands; a keeper sees its own node alone.

Commands: `session` (a generation begins), `inventory`, `keep`, `void`, `copy`, `replicate`, `flush`, `commit`, `cancel`, `sync`,
`clear`. News: `listening`, `inventory`, `held`, `skipped`, `stale`, `flushed`, `committed`, `failed`, `trouble`, `well`,
`no_room`, `synced`, `cleared`.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import crc32c
from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential_jitter

from checkpoint import manifest, points
from checkpoint import part as parts
from checkpoint.errors import CheckpointError, DamagedCheckpoint
from checkpoint.naming import step_path, steps
from checkpoint.part import Part
from checkpoint.source import DirectorySource, Source
from checkpoint.tiers import blueprint, copying
from checkpoint.tiers.copying import Cancelled, Copy
from checkpoint.tiers.exchange import RemotePart, Server, Unreachable
from checkpoint.tiers.pace import Pace
from checkpoint.tiers.session import SLABS, Control
from checkpoint.tiers.slabs import Slab, Slabs, SlabSource

log = logging.getLogger(__name__)

Message = Mapping[str, Any]

HANG_S = 30.0
SEAL_THREADS = 2
SPARE = "spare"
CANCELLED = "cancelled"
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 30.0


@dataclass
class Tier:
    """A place that this keeper writes to.

    Attributes:
        root: of a node's tier: where its parts are; of the durable one: of committed checkpoints.
        mark: a file that is in the durable one's root as long as that is there.
        busy: whether a job runs.
        job: number of the one that runs, or ran last.
        moved_t: when the job last got on.
        flushed: what this node has flushed last, until it is committed: its slab may hold something newer by then.
    """

    name: str
    durable: bool
    root: Path
    keep_last: int
    keep_every: int | None
    pace: Pace
    mark: str | None = None
    pool: Executor = field(default_factory=lambda: ThreadPoolExecutor(1))
    cancelled: threading.Event = field(default_factory=threading.Event)
    busy: bool = False
    job: int = 0
    moved_t: float = 0.0
    trouble_t: float | None = None
    flushed: tuple[Part, dict[str, bytes]] | None = None

    def must_be_there(self) -> None:
        """Raises FileNotFoundError where the file system is not mounted: what is made in its place would be hidden by it later."""
        if self.mark is not None and not (self.root / self.mark).exists():
            raise FileNotFoundError(errno.ENOENT, f"{self.mark} is not there any more: is the file system mounted?", str(self.root))


@dataclass
class Group:
    """The workers of this node in one generation, in which it is the `node`-th; so parts are numbered, whoever holds them."""

    generation: int
    node: int
    nodes: int
    ranks: frozenset[int]
    layouts: dict[int, Message] = field(default_factory=dict)
    taken: dict[int, dict[int, Message]] = field(default_factory=dict)  # step: rank: message
    skipped: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)  # of the present loan
    prepared: bool = False


class Keeper:
    """Args: settings: see `resilient.agent.storage`, which writes them."""

    def __init__(self, settings: Message) -> None:
        self._node: int = settings["node"]
        self._host: str = settings["host"]
        self._token: str = settings["token"]
        self._directory = Path(settings["directory"])
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._memory: str = settings["memory"]["name"]
        self._places = [Path(place) for place in settings["memory"]["places"]]
        self._count: int = settings["memory"]["slabs"]
        self._tiers = {
            entry["name"]: Tier(
                entry["name"],
                entry["durable"],
                Path(entry["path"]),
                entry["keep_last"],
                entry.get("keep_every"),
                Pace(entry.get("max_bytes_per_s")),
                entry.get("mark"),
            )
            for entry in settings["tiers"]
        }
        self._replicas = Tier(self._memory, False, Path(), 1, None, Pace(None))
        self._unwanted: set[int] = set()  # numbers of jobs that were cancelled
        self._control = Control(self._directory / "control", create=True)
        self._loan = self._control.lent()[0] + 1
        self._lent: int | None = None
        self._slabs = self._open_slabs()
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._group: Group | None = None
        self._preparing = asyncio.Lock()
        self._sealing: set[asyncio.Task[None]] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._seal_pool = ThreadPoolExecutor(SEAL_THREADS, thread_name_prefix="seal")
        self._out = threading.Lock()
        self._last: Part | None = None
        self._unusable_t: float | None = None  # since when snapshots cannot be written into slabs
        self._address = ""

    # -- the process ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until the standard input ends."""
        loop = asyncio.get_running_loop()
        path = self._directory / "keeper.sock"
        path.unlink(missing_ok=True)
        self._inbox.setblocking(False)
        self._inbox.bind(str(path))
        loop.add_reader(self._inbox, self._receive)
        roots = [*self._places, *(tier.root for tier in self._tiers.values() if not tier.durable)]
        port = await Server(roots, self._token).start(self._host)
        self._address = f"{self._host}:{port}"
        self._say("listening", address=self._address)
        reader = asyncio.StreamReader(limit=1 << 26)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", buffering=0))
        self._background(self._watch())
        async for line in reader:
            await self._command(json.loads(line))
        os._exit(0)  # neither a job that hangs in the kernel nor a reader far away may hold up the end

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._sealing.discard(task)
        self._forgetting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A defect. The agent starts another keeper, which finds on the disk what this one has done.
            log.error("the keeper ends", exc_info=task.exception())
            os._exit(1)

    def _say(self, what: str, **fields: object) -> None:
        line = json.dumps({"what": what, **fields}).encode() + b"\n"
        with self._out:
            try:
                while line:
                    line = line[os.write(1, line) :]
            except BrokenPipeError:
                os._exit(0)  # the agent is dead

    async def _watch(self) -> None:
        """Tell of jobs that do not get on."""
        while True:
            await asyncio.sleep(1.0)
            for tier in self._tiers.values():
                if tier.busy and tier.trouble_t is None and time.monotonic() - tier.moved_t > HANG_S:
                    self._trouble(tier, f"nothing has been written for {HANG_S:.0f} s", None)

    # -- commands ------------------------------------------------------------------------------------------------------

    async def _command(self, message: Message) -> None:
        match message["do"]:
            case "session":
                await self._settle()
                self._begin(message)
            case "inventory":
                await self._settle()
                self._say("inventory", parts=await asyncio.to_thread(self._inventory), address=self._address)
            case "keep":
                self._keep(message)
            case "void":
                self._void(message)
            case "copy" | "replicate" | "flush" | "commit" as kind:
                self._start(kind, message)
            case "cancel":
                self._cancel(message["id"])
            case "sync":
                await self._settle()
                self._say("synced", token=message.get("token"))
            case "clear":
                await self._clear(message["tiers"])

    async def _settle(self) -> None:
        """Until what the workers have said by now is done, and what was to be forgotten is gone."""
        self._receive()
        while self._sealing or self._forgetting:
            await asyncio.wait(self._sealing | self._forgetting)

    def _begin(self, message: Message) -> None:
        first = message["first_rank"]
        ranks = frozenset(range(first, first + message["ranks"]))
        self._group = Group(message["generation"], message["node_rank"], message["nodes"], ranks)
        self._last = None
        self._slabs.rescan()
        self._slabs.retire()
        self._slabs.keep(lambda part: True)
        if message.get("renew"):
            self._slabs.renew()
        self._loan += 1
        self._lent = None
        self._control.lend(self._loan, None)
        group = self._group
        for rank in group.ranks:  # announced to a keeper before this one
            found = blueprint.announced(self._directory, rank)
            if found is not None and found["generation"] == group.generation:
                group.layouts[rank] = found
        self._announced(group)

    def _announced(self, group: Group) -> None:
        """Once all workers have said what they will write, slabs are made for it."""
        if group.layouts.keys() == group.ranks and not group.prepared:
            group.prepared = True
            self._background(self._prepare(group))

    def _inventory(self) -> list[dict[str, object]]:
        """Every part that is here."""
        self._slabs.rescan()
        found = [
            self._entry(self._memory, self._slabs.root / f"step-{step:08d}", part, replica=False)
            for step, part in self._slabs.parts().items()
        ]
        for name, root in self._roots():
            for directory in (root, *root.glob("replica-*")):
                for step in steps(directory):
                    path = step_path(directory, step)
                    if path.is_symlink():
                        continue
                    with contextlib.suppress(DamagedCheckpoint):
                        found.append(self._entry(name, path, parts.read(path), replica=directory != root))
        return found

    def _roots(self) -> list[tuple[str, Path]]:
        """Where parts lie in directories of their own: the node's tiers, and replicas beside the slabs."""
        return [(self._memory, self._slabs.root), *((t.name, t.root) for t in self._tiers.values() if not t.durable)]

    @staticmethod
    def _entry(tier: str, path: Path, part: Part, *, replica: bool) -> dict[str, object]:
        return {
            **{"tier": tier, "directory": str(path), "step": part.step, "generation": part.generation},
            **{"owner": part.node, "nodes": part.nodes, "bytes": part.size_bytes, "replica": replica},
        }

    def _keep(self, message: Message) -> None:
        """Of a tier nothing but these steps is needed as far as `upto`; beyond it, what is of today and was not left out."""
        wanted, upto, generation = set(message["steps"]), message["upto"], message["generation"]
        left_out = set(message["left_out"])

        def needed(part: Part) -> bool:
            coming = part.generation >= generation and part.step > upto and part.step not in left_out
            return coming or part.step in wanted

        if message["tier"] == self._memory:
            self._slabs.keep(needed)
            if self._slabs.misfits and self._group is not None:
                self._background(self._prepare(self._group))
            self._offer()
        roots = [root for name, root in self._roots() if name == message["tier"]]
        self._forgetting.add(self._background(asyncio.to_thread(_forget, roots, needed)))

    def _void(self, message: Message) -> None:
        """What generations up to this one computed beyond a step is nobody's part any more."""

        step: int = message["step"]
        generation: int = message["generation"]

        def needed(part: Part) -> bool:
            return part.step <= step or part.generation > generation

        for part in self._slabs.parts().values():
            if not needed(part):
                self._slabs.forget(part.step)
        self._offer()
        roots = [root for _, root in self._roots()]
        self._forgetting.add(self._background(asyncio.to_thread(_forget, roots, needed)))

    async def _clear(self, names: Iterable[str]) -> None:
        for tier in (*self._tiers.values(), self._replicas):
            tier.cancelled.set()
        if self._memory in names:
            self._control.lend(self._loan, None)
            await asyncio.to_thread(self._slabs.clear)
            _remove_empty(self._slabs.root.parent)
        for tier in self._tiers.values():
            if tier.name in names and not tier.durable:
                await asyncio.to_thread(shutil.rmtree, tier.root, True)
                _remove_empty(tier.root.parent)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._say("cleared")

    # -- workers -------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message = json.loads(self._inbox.recv(1 << 18))
                group = self._group
                if group is None or message["generation"] != group.generation or message["rank"] not in group.ranks:
                    continue
                match message["say"]:
                    case "layout":
                        group.layouts[message["rank"]] = message
                        self._announced(group)
                    case "taken":
                        self._taken(group, message)
                    case "skipped":
                        self._skipped(group, message["step"], "no slab was free")
                    case "passed":
                        self._passed(group, message)
                    case "broken":
                        self._broken(group, message)

    async def _prepare(self, group: Group) -> None:
        """Make slabs for what the workers have announced, in the first place that has room."""
        async with self._preparing:
            if group is self._group:
                await self._make_slabs(group)

    async def _make_slabs(self, group: Group) -> None:
        first = next(iter(group.layouts.values()))
        plan = blueprint.read(self._directory, first["digest"], group.ranks)
        for place in self._places:
            try:
                if place != self._slabs.root:
                    self._slabs = await asyncio.to_thread(Slabs, place, self._count)
                await asyncio.to_thread(self._slabs.prepare, plan)
                _point(self._directory / SLABS, place)
            except OSError as error:
                self._say("trouble", tier=self._memory, detail=f"no slabs in {place}: {error.strerror or error}", errno=error.errno)
                if self._slabs.parts():
                    return  # of a generation with other nodes; there is room once they are not needed any more
                await asyncio.to_thread(self._slabs.clear)
                continue
            self._offer()
            return
        self._say("no_room", bytes=plan.size_bytes * self._count, places=[str(place) for place in self._places])

    def _open_slabs(self) -> Slabs:
        """In the place where an earlier keeper had them."""
        chosen = next((place for place in self._places if (place / "slab-0").is_dir()), None)
        for place in [chosen] if chosen else self._places:
            with contextlib.suppress(OSError):
                return Slabs(place, self._count)
        return Slabs(self._directory / "slabs", self._count)

    def _offer(self) -> None:
        """Lend a slab, if none is lent and there is one."""
        if self._group is None or self._lent is not None:
            return
        self._lent = self._slabs.lend()
        if self._lent is not None:
            self._loan += 1
            self._group.users = set()
            self._control.lend(self._loan, self._lent)

    def _revoke(self, slab: Slab) -> None:
        """Lend another slab in place of this one. A worker may have begun with it nevertheless: then copies of it fail."""
        slab.lent = False
        if self._lent == slab.index:
            self._lent = None
            self._loan += 1
            self._control.lend(self._loan, None)
            self._offer()

    def _taken(self, group: Group, message: Message) -> None:
        step, rank = message["step"], message["rank"]
        if message["loan"] != self._loan or self._lent is None:
            self._skipped(group, step, "it was copied for a keeper before this one")
            return
        group.users.add(rank)
        if message["again"] and step in group.skipped:
            group.skipped.remove(step)
        if step not in group.skipped:
            group.taken.setdefault(step, {})[rank] = message
        self._returned(group, step)

    def _passed(self, group: Group, message: Message) -> None:
        """A rank does without the slab that is lent."""
        if message["loan"] == self._loan and self._lent is not None:
            group.users.add(message["rank"])
            self._returned(group, None)

    def _returned(self, group: Group, step: int | None) -> None:
        """Once all ranks are done with the slab that is lent: it holds this step of all of them, or nothing of use."""
        if group.users != group.ranks or self._lent is None:
            return
        index, self._lent = self._lent, None
        mine = group.taken.pop(step, {}) if step is not None else {}
        for other in list(group.taken):
            self._skipped(group, other, "ranks took other steps")
        if step is not None and mine.keys() == group.ranks:
            self._sealing.add(self._background(self._seal(group, index, step, mine)))
        else:
            self._slabs.give_back(index)
            if step is not None:
                self._skipped(group, step, "a rank left it out")
        self._offer()

    def _broken(self, group: Group, message: Message) -> None:
        """A rank could not write into the slab that is lent."""
        if message["loan"] == self._loan and self._lent is not None:
            self._unusable(self._lent, message["why"], message["errno"])
            self._skipped(group, message["step"], message["why"])
            self._passed(group, message)

    def _unusable(self, index: int, why: str, number: int | None) -> None:
        """A slab is not there any more, or has no room for one more page: it is made anew where that is needed."""
        if self._unusable_t is None:
            self._unusable_t = time.monotonic()
            self._say("trouble", tier=self._memory, detail=why, errno=number)
        self._slabs.doubt(index)
        if self._group is not None and self._group.prepared:
            self._background(self._prepare(self._group))

    def _skipped(self, group: Group, step: int, why: str) -> None:
        group.taken.pop(step, None)
        if step not in group.skipped:
            group.skipped.add(step)
            self._say("skipped", step=step, generation=group.generation, why=why)

    async def _seal(self, group: Group, index: int, step: int, taken: Mapping[int, Message]) -> None:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        seal = self._slabs.seal
        try:
            part = await loop.run_in_executor(None, seal, index, step, group.generation, group.node, group.nodes, self._seal_pool)
        except (OSError, ValueError) as error:
            self._slabs.give_back(index)
            self._unusable(index, f"{error}", getattr(error, "errno", None))
            self._skipped(group, step, f"{error}")
            self._offer()
            return
        if self._unusable_t is not None:
            self._say("well", tier=self._memory, down_s=time.monotonic() - self._unusable_t)
            self._unusable_t = None
        changed = any(message["changed"] for message in taken.values())
        if changed and self._last is not None and self._last.step != step and self._last.chunks == part.chunks:
            self._slabs.forget(step)
            self._say("stale", step=step, generation=group.generation, before=self._last.step)
        else:
            self._last = part
            self._say(
                "held",
                **self._entry(self._memory, step_path(self._slabs.root, step), part, replica=False),
                stall_s=max(message["stall_s"] for message in taken.values()),
                write_s=time.monotonic() - began,
                wants=sorted({name for message in taken.values() for name in message["tiers"]}),
                again=any(message["again"] for message in taken.values()),
            )
        self._offer()

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _start(self, kind: str, message: Message) -> None:
        if message["tier"] == self._memory:
            tier = self._replicas
            tier.root = self._slabs.root
        else:
            tier = self._tiers[message["tier"]]
        slab = self._slabs.find(message["step"], message["generation"]) if self._needs_slab(kind, tier, message) else None
        if slab is not None and slab.lent and self._group is not None and self._group.users:
            slab = None  # a worker has written into it: what it held is gone, and what it will hold may be the last step
        if slab is not None:  # at once: the next message may say that it is not needed
            slab.pins += 1
            if slab.lent:
                self._revoke(slab)
        self._background(self._job(kind, tier, message, slab))

    def _needs_slab(self, kind: str, tier: Tier, message: Message) -> bool:
        """Whether a job reads the step out of a slab, so that the slab may not be lent meanwhile.

        A replica comes from another node. A commit of what this node flushed last needs no bytes: a slab taken back for it would
        cost the workers the snapshot that they are just copying.
        """
        if kind == "commit" and tier.flushed is not None:
            part = tier.flushed[0]
            return (part.step, part.generation, part.node) != (message["step"], message["generation"], message["owner"])
        return kind != "replicate"

    async def _job(self, kind: str, tier: Tier, message: Message, slab: Slab | None) -> None:
        """One job after the other on each tier; what comes later waits."""
        work = {"copy": self._copy, "replicate": self._replicate, "flush": self._flush, "commit": self._commit}[kind]
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()
        try:
            await loop.run_in_executor(tier.pool, self._persist, kind, tier, message, slab, cancelled, work)
        finally:
            if slab is not None:
                slab.pins -= 1
            self._offer()

    def _persist(
        self,
        kind: str,
        tier: Tier,
        message: Message,
        slab: Slab | None,
        cancelled: threading.Event,
        work: Callable[[Tier, Message, Slab | None, Copy], None],
    ) -> None:
        """Do a job again and again until the tier is well, or the job is not wanted any more."""
        tier.cancelled, tier.busy, tier.moved_t = cancelled, True, time.monotonic()
        tier.job = message["id"]
        if tier.job in self._unwanted:
            cancelled.set()

        def moved(size_bytes: int) -> None:
            tier.moved_t = time.monotonic()

        def troubled(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            number = error.errno if isinstance(error, OSError) else None
            self._trouble(tier, f"{error}", number)

        def sleep(seconds: float) -> None:
            cancelled.wait(seconds)

        attempts = Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_exponential_jitter(multiplier=FIRST_RETRY_S, max=LAST_RETRY_S),
            sleep=sleep,
            stop=lambda state: cancelled.is_set(),
            before_sleep=troubled,
            reraise=True,
        )
        try:
            attempts(work, tier, message, slab, Copy(tier.pace, cancelled, moved))
        except (CheckpointError, OSError, Cancelled, ValueError) as error:
            fields = {name: message[name] for name in ("tier", "step", "generation", "id") if name in message}
            reason = CANCELLED if cancelled.is_set() else f"{error}"
            lost = isinstance(error, Unreachable)
            self._say("failed", job=kind, **fields, owner=message["owner"], detail=reason, unreachable=lost)
        else:
            if tier.trouble_t is not None:
                self._say("well", tier=tier.name, down_s=time.monotonic() - tier.trouble_t)
                tier.trouble_t = None
        finally:
            tier.busy = False

    def _cancel(self, number: int) -> None:
        """A job is not wanted any more, whether it runs or waits for its turn."""
        self._unwanted.add(number)
        for tier in (*self._tiers.values(), self._replicas):
            if tier.job == number:
                tier.cancelled.set()

    def _trouble(self, tier: Tier, detail: str, number: int | None) -> None:
        if tier.trouble_t is None:
            tier.trouble_t = time.monotonic()
            self._say("trouble", tier=tier.name, detail=detail, errno=number)

    def _source(self, message: Message, slab: Slab | None) -> tuple[Source, Part, dict[str, bytes]]:
        """A part of a step, its own or a replica, from the nearest tier that has it."""
        step, generation, owner = message["step"], message["generation"], message["owner"]
        held = slab.part if slab is not None else None
        if slab is not None and held is not None and (held.step, held.generation, held.node) == (step, generation, owner):
            return SlabSource(slab), held, _documents(slab.directory, held)
        for _, root in self._roots():
            for path in (step_path(root, step), step_path(root / f"replica-{owner}", step)):
                with contextlib.suppress(DamagedCheckpoint):
                    part = parts.read(path)
                    if (part.generation, part.node) == (generation, owner):
                        return DirectorySource(path, chunks=part.chunks), part, _documents(path, part)
        raise CheckpointError(f"node {self._node} does not hold part {owner} of step {step}")

    def _described(self, tier: Tier, message: Message, slab: Slab | None) -> tuple[Part, dict[str, bytes]]:
        """What a part that this node has flushed is said to be."""
        wanted = (message["step"], message["generation"], message["owner"])
        if tier.flushed is not None:
            part, documents = tier.flushed
            if (part.step, part.generation, part.node) == wanted:
                return part, documents
        source, part, documents = self._source(message, slab)
        source.close()
        return part, documents

    def _copy(self, tier: Tier, message: Message, slab: Slab | None, copy: Copy) -> None:
        began = time.monotonic()
        source, part, documents = self._source(message, slab)
        copy.check = source.check
        with contextlib.closing(source):
            target = step_path(tier.root, part.step)
            copying.to_tier(source, part, documents, target, copy)
        self._held(tier, part, target, began, message, replica=False)

    def _replicate(self, tier: Tier, message: Message, slab: Slab | None, copy: Copy) -> None:
        """Fetch a part of the node whose buddy this is."""
        began = time.monotonic()
        with contextlib.closing(RemotePart(message["address"], message["directory"], self._token, copy.cancelled)) as source:
            part = source.part
            if (part.step, part.generation, part.node) != (message["step"], message["generation"], message["owner"]):
                raise CheckpointError(f"{source.path} holds step {part.step} of generation {part.generation}")
            target = step_path(tier.root / f"replica-{part.node}", part.step)
            points.reached("replica_begun")
            spare = target.with_name(SPARE)
            copying.to_tier(source, part, _fetched(source, spare), target, copy, spare=spare)
            points.reached("replica_held")
        self._held(tier, part, target, began, message, replica=True)

    def _held(self, tier: Tier, part: Part, target: Path, began: float, message: Message, *, replica: bool) -> None:
        self._say(
            "held",
            id=message["id"],
            **self._entry(tier.name, target, part, replica=replica),
            **{"stall_s": 0.0, "write_s": time.monotonic() - began, "wants": []},
        )

    def _flush(self, tier: Tier, message: Message, slab: Slab | None, copy: Copy) -> None:
        began = time.monotonic()
        tier.must_be_there()
        source, part, documents = self._source(message, slab)
        copy.check = source.check
        with contextlib.closing(source):
            copying.flush(source, part, documents, tier.root, message["attempt"], copy)
        tier.flushed = part, documents
        self._say(
            "flushed",
            id=message["id"],
            **{"tier": tier.name, "step": part.step, "generation": part.generation, "owner": part.node},
            **{"bytes": part.size_bytes, "write_s": time.monotonic() - began},
        )

    def _commit(self, tier: Tier, message: Message, slab: Slab | None, copy: Copy) -> None:
        began = time.monotonic()
        tier.must_be_there()
        part, documents = self._described(tier, message, slab)
        contents = copying.finish(
            part, documents, tier.root, message["attempt"], keep_last=tier.keep_last, keep_every=tier.keep_every
        )
        tier.flushed = None
        size = contents.size_bytes + len(manifest.encode(contents))
        self._say(
            "committed",
            id=message["id"],
            **{"tier": tier.name, "step": part.step, "generation": part.generation, "owner": part.node},
            **{"bytes": size, "files": len(contents.files) + 1, "write_s": time.monotonic() - began},
        )


def _point(link: Path, target: Path) -> None:
    """Make a link lead to another place, at once."""
    new = link.with_suffix(".new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def _documents(directory: Path, part: Part) -> dict[str, bytes]:
    try:
        return {name: (directory / name).read_bytes() for name in part.files}
    except FileNotFoundError as error:
        raise DamagedCheckpoint(directory, f"{error.filename} is missing") from None


def _fetched(source: RemotePart, spare: Path) -> dict[str, bytes]:
    """The metadata files of a part; what an older replica has of them already need not travel."""
    found = {}
    for name, entry in source.part.files.items():
        text = b""
        with contextlib.suppress(OSError):
            text = (spare / name).read_bytes()
        if (len(text), crc32c.crc32c(text)) != (entry.size_bytes, entry.crc32c):
            text = source.document(name)
        found[name] = text
    return found


def _forget(roots: Iterable[Path], needed: Callable[[Part], bool]) -> None:
    """Delete the parts that are not needed, replicas too; slabs are overwritten instead."""
    for root in roots:
        for directory in (root, *root.glob("replica-*")):
            for step in steps(directory):
                path = step_path(directory, step)
                if path.is_symlink():
                    continue
                try:
                    gone = not needed(parts.read(path))
                except DamagedCheckpoint:
                    gone = True
                if gone:
                    (path / parts.NAME).unlink(missing_ok=True)  # from here on it is nobody's part
                    points.reached("part_forgotten")
                    spare = path.with_name(SPARE)
                    if directory != root and not spare.exists():
                        with contextlib.suppress(OSError):
                            path.rename(spare)  # the next replica finds its files there
                            continue
                    shutil.rmtree(path, ignore_errors=True)


def _remove_empty(path: Path) -> None:
    """Remove what held only what was removed before it."""
    with contextlib.suppress(OSError):
        path.rmdir()
        if path.parent.name.startswith("resilient-"):
            path.parent.rmdir()


def main() -> None:
    """Entry point: settings on the first line of the standard input, commands on the others; the end of it is the only end."""
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):  # a scheduler sends them to every process of a job
        signal.signal(sig, signal.SIG_IGN)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:  # what follows the line is the loop's
        settings = json.loads(unbuffered.readline())
    with contextlib.suppress(OSError):
        os.nice(settings.get("nice", 5))
    asyncio.run(Keeper(settings).run())


if __name__ == "__main__":
    main()
