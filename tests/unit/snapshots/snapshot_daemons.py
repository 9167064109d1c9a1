"""Daemons as the snapshot core sees them, in memory: they hold, copy, flush and forget as they are told, and no sooner."""

from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest

from checkpoint.protocol import (
    Cancel,
    Committed,
    DaemonNews,
    Discard,
    DriverRequest,
    Flushed,
    Held,
    Inventory,
    JobFailed,
    NodeShard,
    Replicate,
    Retain,
    Skipped,
    SnapshotKey,
    StartJob,
    TierTrouble,
    TierWell,
)
from resilient.recovery.rollback import InvalidationRule

RAM, NVME, DURABLE = "ram", "nvme", "scratch"
BUFFERS = 3
TAKE_INVENTORY = "take inventory"
BEGIN_SESSION = "begin session"

Place = tuple[str, SnapshotKey, int, bool]
"""Tier, snapshot, number of the shard, and whether it is a replica."""


def needed(retain: Retain | None, key: SnapshotKey, again: SnapshotKey | None) -> bool:
    """Whether a daemon keeps a snapshot by the last request that it got. Args: again: that was taken again."""
    if retain is None or key.step in retain.steps:
        return True
    if key.generation < retain.generation or key.step <= retain.upto:
        return False
    left_out = dict(zip_longest(retain.left_out, retain.again, fillvalue=0))
    return key.step not in left_out or (key == again and left_out[key.step] == 0)


@dataclass
class DurableTier:
    """What all nodes share: of each job the shards that are flushed, the committed steps, and the fence."""

    shards: int
    flushed: dict[int, set[int]] = field(default_factory=dict)
    committed: dict[int, SnapshotKey] = field(default_factory=dict)
    fence: int = 0


@dataclass
class Work:
    request: StartJob | Replicate
    cancelled: bool = False


@dataclass
class Daemon:
    """A node's daemon, with what lies between it and the driver in both directions."""

    node: int
    durable: DurableTier
    alive: bool = True
    rank: int | None = None
    step: int = 0
    held: set[Place] = field(default_factory=set)
    retain: Retain | None = None
    again: SnapshotKey | None = None
    work: list[Work] = field(default_factory=list)
    inbox: deque[DriverRequest | str] = field(default_factory=deque)
    outbox: deque[tuple[DaemonNews, bool]] = field(default_factory=deque)  # and whether it answers a request for the inventory
    generation: int = 0
    troubled: set[str] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"n{self.node}:9"

    @staticmethod
    def directory(place: Place) -> str:
        return "/".join(map(str, place))

    def _say(self, news: DaemonNews) -> None:
        self.outbox.append((news, False))

    def shard(self, place: Place) -> NodeShard:
        tier, key, number, replica = place
        return NodeShard(
            tier=tier,
            directory=self.directory(place),
            key=key,
            shard=number,
            shards=self.durable.shards,
            size_bytes=10,
            replica=replica,
        )

    def inventory(self, *, asked: bool) -> None:
        shards = tuple(self.shard(place) for place in sorted(self.held))
        self.outbox.append((Inventory(generation=self.generation, address=self.address, shards=shards), asked))

    def ask(self) -> None:
        """It is asked what it holds; whatever it was asked before needs no answer any more."""
        self.inbox = deque(each for each in self.inbox if each != TAKE_INVENTORY)
        self.outbox = deque((news, asked) for news, asked in self.outbox if not asked)
        self.inbox.append(TAKE_INVENTORY)

    # -- workers -------------------------------------------------------------------------------------------------------

    def take(self, wants: tuple[str, ...], *, left_out: bool = False) -> None:
        """Workers take the next step, if there is a buffer, unless they are too busy with the one before."""
        assert self.rank is not None
        self.step += 1
        own = [place for place in self.held if place[0] == RAM and not place[3]]
        if left_out or len(own) >= BUFFERS:
            self._say(Skipped(generation=self.generation, step=self.step, reason="no buffer"))
            return
        place = (RAM, SnapshotKey(self.step, self.generation), self.rank % self.durable.shards, False)
        self._put(place)
        self._say(Held(generation=self.generation, shard=self.shard(place), wants=wants))

    def take_again(self, wants: tuple[str, ...]) -> bool:
        """Workers take the present step once more, for a node has left it out; whether there was a buffer."""
        assert self.rank is not None
        key = self.again = SnapshotKey(self.step, self.generation)
        place = (RAM, key, self.rank % self.durable.shards, False)
        if len([each for each in self.held if each[0] == RAM and not each[3] and each != place]) >= BUFFERS:
            self._say(Skipped(generation=self.generation, step=self.step, reason="no buffer", again=1))
            return False
        self._put(place)
        self._say(Held(generation=self.generation, shard=self.shard(place), wants=wants, again=1))
        return True

    def _put(self, place: Place) -> None:
        """In the place of what has the same step, whichever shard it is of: only replicas have a directory for each shard."""
        tier, key, shard, replica = place
        self.held = {
            each
            for each in self.held
            if (each[0], each[1].step, each[3]) != (tier, key.step, replica) or (replica and each[2] != shard)
        }
        self.held.add(place)

    # -- requests ------------------------------------------------------------------------------------------------------

    def handle(self) -> None:
        """The next request."""
        match self.inbox.popleft():
            case Retain() as retain:
                if retain.tier == RAM:
                    self.retain = retain
                self.held -= self.given_up(retain)
            case Discard() as discard:
                invalid = InvalidationRule(discard.invalid_generation, discard.step)
                self.held = {place for place in self.held if not invalid.covers(place[1].step, place[1].generation)}
            case StartJob() | Replicate() as request:
                self.work.append(Work(request))
            case Cancel() as cancel:
                for work in self.work:
                    work.cancelled |= work.request.job_id == cancel.job_id
            case "take inventory":
                self.inventory(asked=True)
            case "begin session":
                self.retain = None

    def given_up(self, retain: Retain) -> set[Place]:
        """What is forgotten by a request: not what is being read."""
        read = {work.request.key for work in self.work if isinstance(work.request, StartJob)}
        return {
            place
            for place in self.held
            if place[0] == retain.tier and not needed(retain, place[1], self.again) and (place[3] or place[1] not in read)
        }

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def finish(self, work: Work, source: "Daemon | None", *, succeeds: bool) -> None:
        """A job ends. Args: source: the node that a replica comes from."""
        self.work.remove(work)
        request, durable = work.request, self.durable
        kind = request.kind if isinstance(request, StartJob) else "replicate"
        has = any(place[1:3] == (request.key, request.shard) for place in (source or self).held)
        unreachable = source is not None and not source.alive
        fenced = kind == "commit" and request.generation < durable.fence
        called_off = work.cancelled and kind != "commit"  # one that is being made is made, whatever is told meanwhile
        if called_off or unreachable or fenced or not succeeds or (kind != "commit" and not has):
            self._say(
                JobFailed(
                    generation=request.generation,
                    kind=kind,
                    job_id=request.job_id,
                    tier=request.tier,
                    key=request.key,
                    shard=request.shard,
                    reason="no",
                    cancelled=work.cancelled,
                    unreachable=unreachable,
                    superseded=kind in ("copy", "flush") and not has,
                )
            )
            self._forget()
            return
        if request.tier in self.troubled:
            self.troubled.remove(request.tier)
            self._say(TierWell(generation=self.generation, tier=request.tier, down_s=1.0))
        if kind in ("copy", "replicate"):
            place = (request.tier, request.key, request.shard, kind == "replicate")
            self._put(place)
            self._say(Held(generation=request.generation, shard=self.shard(place), job_id=request.job_id))
        else:
            self._to_durable(request, kind)
        self._forget()

    def trouble(self, work: Work) -> None:
        """A job does not get on."""
        if work.request.tier not in self.troubled:
            self.troubled.add(work.request.tier)
            self._say(TierTrouble(generation=self.generation, tier=work.request.tier, detail="nothing has been written"))

    def _forget(self) -> None:
        """What a job has read may be overwritten now."""
        if self.retain is not None and self.rank is not None and BEGIN_SESSION not in self.inbox:  # workers overwrite it
            self.held -= {place for place in self.given_up(self.retain) if not place[3]}

    def _to_durable(self, request: StartJob | Replicate, kind: str) -> None:
        done = {"generation": request.generation, "job_id": request.job_id, "tier": request.tier, "key": request.key}
        flushed = self.durable.flushed.setdefault(request.job_id, set())
        if kind == "flush":
            flushed.add(request.shard)
            self._say(Flushed(**done, shard=request.shard, size_bytes=10, write_s=0.1))  # type: ignore[arg-type]
            return
        assert len(flushed) == self.durable.shards, "a step is committed before all have flushed it"
        self.durable.committed[request.key.step] = request.key
        self._say(Committed(**done, shard=request.shard, size_bytes=30, files=3, write_s=0.1))  # type: ignore[arg-type]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The daemon dies, and another one finds what it held; what it was told is forgotten."""
        self.work, self.retain, self.again, self.troubled = [], None, None, set()
        asked = TAKE_INVENTORY in self.inbox
        self.inbox.clear()
        self.inventory(asked=False)
        if asked:
            self.inbox.append(TAKE_INVENTORY)

    def die(self, *, keeps: tuple[str, ...]) -> None:
        """The node is gone. Args: keeps: tiers that are still there when it returns."""
        self.alive, self.rank, self.work, self.retain, self.again = False, None, [], None, None
        self.troubled.clear()
        self.inbox.clear()
        self.outbox.clear()
        self.held = {place for place in self.held if place[0] in keeps}

    def will_hold(self) -> set[Place]:
        """What is left once all that it was told has reached it."""
        held, running = set(self.held), True
        for request in self.inbox:
            if request == BEGIN_SESSION:
                running = False
            if isinstance(request, Retain) and running:
                held = {place for place in held if place[0] != request.tier or needed(request, place[1], self.again)}
            if isinstance(request, Discard):
                invalid = InvalidationRule(request.invalid_generation, request.step)
                held = {place for place in held if not invalid.covers(place[1].step, place[1].generation)}
        return held
