"""Courses of events played through the snapshot core, without a process: what daemons report, and what is asked of them."""

from collections.abc import Sequence
from typing import Any, TypeVar

from checkpoint.protocol import (
    Committed,
    DaemonNews,
    Flushed,
    Held,
    Inventory,
    JobFailed,
    NodeShard,
    Replicate,
    Skipped,
    SnapshotKey,
    Stale,
    StartJob,
)
from resilient.outbox import Effect, Outbox, RequestDaemon, WriteEvent
from resilient.protocol.candidates import unpack
from resilient.snapshots import Snapshots, StoragePlan, TierPlan

R = TypeVar("R")


def address(node: int) -> str:
    return f"10.0.0.{node}:9"


def shard(step: int, number: int, *, of: int = 2, generation: int = 5, tier: str = "ram", replica: bool = False) -> NodeShard:
    """A shard of 100 bytes."""
    return NodeShard(
        tier=tier,
        directory=f"/{tier}/{'replica/' * replica}{step}",
        key=SnapshotKey(step, generation),
        shard=number,
        shards=of,
        size_bytes=100,
        replica=replica,
    )


def done(request: StartJob) -> DaemonNews:
    """What a daemon reports that has done what it was asked for."""
    where: dict[str, Any] = {"job_id": request.job_id, "generation": request.generation}
    at: dict[str, Any] = {**where, "tier": request.tier, "key": request.key, "shard": request.shard}
    match request.kind:
        case "flush":
            return Flushed(**at, size_bytes=100, write_s=0.1)
        case "commit":
            return Committed(**at, size_bytes=200, files=81, write_s=0.1)
    made = shard(request.key.step, request.shard, generation=request.key.generation, tier=request.tier)
    return Held(**where, shard=made, write_s=0.1)


def replicated(request: Replicate, *, of: int = 2) -> Held:
    """What a buddy reports that has got a shard."""
    key = request.key
    made = shard(key.step, request.shard, of=of, generation=key.generation, tier=request.tier, replica=True)
    return Held(generation=request.generation, shard=made, job_id=request.job_id, write_s=0.1)


def failed(request: StartJob | Replicate, reason: str = "no good", **how: bool) -> JobFailed:
    """What a daemon reports that could not do what it was asked for."""
    return JobFailed(
        generation=request.generation,
        kind=request.kind if isinstance(request, StartJob) else "replicate",
        job_id=request.job_id,
        tier=request.tier,
        key=request.key,
        shard=request.shard,
        reason=reason,
        **how,
    )


class Course:
    """A snapshot core with nodes that hold nothing, in its first generation.

    Args:
        spares: nodes that are there and not members.
        others: the nodes' slower tiers.
    """

    def __init__(
        self,
        nodes: int = 2,
        *,
        spares: int = 0,
        replicas: bool = False,
        buffers: int = 2,
        keep_last: int = 1,
        others: tuple[TierPlan, ...] = (),
        generation: int = 5,
        **plan: Any,
    ) -> None:
        memory = TierPlan("ram", keep_last, replicas)
        self.core = Snapshots(StoragePlan(memory, others, TierPlan("scratch", 3), buffers, **plan))
        self.members = list(range(nodes))
        self.generation = generation
        self.now = 1000.0
        self.effects: list[Effect] = []
        for node in range(nodes + spares):
            self.core.inventory(node, Inventory(generation=0, address=address(node), shards=()))
        self.begin(generation)

    def do(self, method: str, *arguments: Any) -> list[Effect]:
        """One turn."""
        out = Outbox()
        getattr(self.core, method)(*arguments, out)
        turn = out.take()
        self.effects += turn
        return turn

    def begin(self, generation: int, members: Sequence[int] | None = None) -> list[Effect]:
        self.generation, self.members = generation, list(self.members if members is None else members)
        return self.do("begin", generation, self.members)

    def resumed(self, step: int = 0) -> list[Effect]:
        return self.do("resumed", step, self.now)

    def deliver(self, node: int, news: DaemonNews) -> list[Effect]:
        return self.do("on_news", node, news, self.now)

    def taken(self, node: int, step: int, *, wants: tuple[str, ...] = (), again: int = 0) -> list[Effect]:
        """A node's shard of a snapshot is in memory."""
        held = shard(step, self.members.index(node), of=len(self.members), generation=self.generation)
        news = Held(generation=self.generation, shard=held, stall_s=0.01, write_s=0.02, wants=wants, again=again)
        return self.deliver(node, news)

    def all_take(self, step: int, *, wants: tuple[str, ...] = ()) -> list[Effect]:
        return [effect for node in self.members for effect in self.taken(node, step, wants=wants)]

    def skips(self, node: int, step: int, *, again: int = 0, wants: tuple[str, ...] = ()) -> list[Effect]:
        reason = "no buffer was free"
        return self.deliver(node, Skipped(generation=self.generation, step=step, reason=reason, again=again, wants=wants))

    def stale(self, node: int, step: int) -> list[Effect]:
        return self.deliver(node, Stale(generation=self.generation, step=step, before=step - 1))

    def new_daemon(self, node: int, *shards: NodeShard) -> list[Effect]:
        return self.deliver(node, Inventory(generation=self.generation, address=f"10.0.0.{node}:10", shards=shards))

    def stopped(self, held: dict[int, list[NodeShard]]) -> None:
        """Workers have ended, and nodes have sent what they hold."""
        for node, shards in held.items():
            self.core.inventory(node, Inventory(generation=self.generation, address=address(node), shards=tuple(shards)))

    def requests(self, kind: type[R], effects: Sequence[Effect] | None = None) -> list[tuple[int, R]]:
        """What daemons were asked for."""
        found = [each for each in (self.effects if effects is None else effects) if isinstance(each, RequestDaemon)]
        return [(each.node, each.request) for each in found if isinstance(each.request, kind)]

    def jobs(self, kind: str, effects: Sequence[Effect] | None = None) -> list[tuple[int, StartJob]]:
        return [(node, request) for node, request in self.requests(StartJob, effects) if request.kind == kind]

    def events(self, name: str, effects: Sequence[Effect] | None = None) -> list[dict[str, Any]]:
        every = self.effects if effects is None else effects
        return [dict(each.fields) for each in every if isinstance(each, WriteEvent) and each.event == name]

    def all_done(self, requests: Sequence[tuple[int, StartJob]]) -> list[Effect]:
        """Daemons have done what they were asked for."""
        return [effect for node, request in requests for effect in self.deliver(node, done(request))]

    def durable(self, step: int) -> None:
        """A step is held by all nodes and committed."""
        flushed = self.all_done(self.jobs("flush", self.all_take(step, wants=("scratch",))))
        self.all_done(self.jobs("commit", flushed))


def promised(course: Course) -> list[SnapshotKey]:
    """What workers may go on from."""
    return [each.key for each in unpack(course.core.candidates())]
