"""A node as the control core sees it: an agent, at most one rank, and a snapshot daemon, with the way between it and the driver."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from control_play import inventory, shard

from checkpoint.protocol import (
    Committed,
    DaemonNews,
    Discard,
    DriverRequest,
    Flushed,
    Held,
    NodeShard,
    Replicate,
    Retain,
    StartJob,
    Sync,
    Synced,
)
from resilient.control.liveness import NO_STEP
from resilient.protocol.candidates import unpack
from resilient.protocol.messages import (
    AgentMessage,
    Arm,
    DriverMessage,
    EndsFound,
    FindEnds,
    Inspect,
    Inspected,
    Inspection,
    Propose,
    Proposed,
    Ready,
    Record,
    Report,
    Shutdown,
    Start,
    Started,
    Stop,
    WorkerEnded,
)
from resilient.recovery.faults import Raised, WorkerEnd


@dataclass
class Agent:
    """A node as it is.

    Attributes:
        ready: it has said so since its last `Start`.
        unfit: it has failed its health check.
        lost: it has counted as lost since it was launched.
        rank: of its worker, while it has one.
        step: the state's; beat_step: the last that its rank has finished itself.
        hold_at: the boundary at which its rank waits, once a stop was proposed.
        synced: its daemon has settled what workers left, and the driver has heard it.
        heard_s: when the driver last heard of it, attended seconds.
    """

    node: int
    shards: int  # of a snapshot that replicas are made of
    launched: bool = False
    joined: bool = False
    ready: bool = False
    unfit: bool = False
    lost: bool = False
    generation: int = 0
    rank: int | None = None
    step: int = 0
    beat_step: int = NO_STEP
    hold_at: int | None = None
    synced: bool = False
    heard_s: float = 0.0
    held: set[NodeShard] = field(default_factory=set)
    inbox: deque[DriverMessage | DriverRequest] = field(default_factory=deque)
    outbox: deque[AgentMessage] = field(default_factory=deque)

    @property
    def passed(self) -> int:
        """The furthest boundary that its rank has passed."""
        return self.step if self.hold_at is None else min(self.step, self.hold_at - 1)

    @property
    def idle(self) -> bool:
        """It runs no worker, and nothing on its way to it will start one."""
        return self.rank is None and not any(isinstance(each, Start) for each in self.inbox)

    def will_hold(self) -> set[NodeShard]:
        """What is left once all that it was told has reached it."""
        held = set(self.held)
        for request in self.inbox:
            if isinstance(request, Retain | Discard):
                held -= _given_up(held, request)
        return held

    def say_ready(self) -> None:
        self.rank, self.hold_at = None, None
        held = sorted(self.held, key=lambda each: (each.key, each.shard))
        self.outbox.append(Ready(generation=self.generation, store_port=5000, inventory=inventory(self.node, held)))

    def tell_news(self, *news: DaemonNews) -> None:
        self.outbox.append(Report(generation=self.generation, news=news))

    def end(self, code: int, raised: Raised | None, now: float, *, step: int, stopped: bool = False) -> None:
        """Its worker ends."""
        assert self.rank is not None
        end = WorkerEnd(self.rank, self.node, 7, code, now, step, "step", raised)
        self.outbox.append(WorkerEnded(generation=self.generation, end=end, stopped=stopped))
        self.rank = None

    def obey(self, durable: set[int], now: float, resumed: Callable[[int, int], None]) -> None:
        """The next thing that it was told.

        Args:
            durable: steps that are committed.
            resumed: is told the generation and the step that rank 0 goes on from.
        """
        match self.inbox.popleft():
            case Start() as start:
                self._start(start, durable, now, resumed)
            case Stop() as stop if stop.generation == self.generation:
                self.say_ready()
            case Propose() if self.rank is not None:
                if self.hold_at is None:
                    self.hold_at = self.step + 1
                self.outbox.append(Proposed(generation=self.generation, checked=self.passed))
            case Arm() as arm if self.rank is not None:
                assert arm.target > self.passed, f"rank {self.rank} is to stop at boundary {arm.target}, which it has passed"
                self.end(0, None, now, step=arm.target, stopped=True)
            case Inspect() if self.rank is not None:
                found = Inspection(state="S", cpu=0.0, stacks="")
                self.outbox.append(Inspected(generation=self.generation, ranks={self.rank: found}))
            case FindEnds() as asked if asked.generation == self.generation:
                self.outbox.append(EndsFound(generation=self.generation))
            case Shutdown():
                self.rank = None
            case Sync() | StartJob() | Replicate() | Retain() | Discard() as request:
                self._ask_daemon(request, durable)

    def _start(self, start: Start, durable: set[int], now: float, resumed: Callable[[int, int], None]) -> None:
        self.generation, self.rank, self.hold_at, self.beat_step = start.generation, start.node_rank, None, NO_STEP
        newest = max((each.key.step for each in unpack(start.candidates)), default=0)
        reachable = [0, newest, *durable]
        self.step = max(step for step in reachable if start.go_back_to is None or step <= start.go_back_to)
        self.outbox.append(Started(generation=self.generation, pids={self.rank: 7}))
        if self.rank == 0:
            resumed(self.generation, self.step)
            record = Record(0, now, "resumed", {"step": self.step, "tier": "ram"})
            self.outbox.append(Report(generation=self.generation, records=(record,)))

    def _ask_daemon(self, request: DriverRequest, durable: set[int]) -> None:
        match request:
            case Sync():
                self.tell_news(Synced(generation=self.generation))
            case StartJob():
                about: dict[str, Any] = {name: getattr(request, name) for name in ("generation", "job_id", "tier", "key", "shard")}
                if request.kind == "flush":
                    self.tell_news(Flushed(**about, size_bytes=100, write_s=0.1))
                else:
                    durable.add(request.key.step)
                    self.tell_news(Committed(**about, size_bytes=300, files=3, write_s=0.1))
            case Replicate():
                key = request.key
                copy = shard(key.step, request.shard, of=self.shards, generation=key.generation, replica=True)
                self.held.add(copy)
                self.tell_news(Held(generation=request.generation, shard=copy, job_id=request.job_id))
            case Retain():
                self.held -= _given_up(self.held, request)
            case Discard():
                self.held -= _given_up(self.held, request)
                for step in [step for step in durable if step > request.step]:
                    durable.discard(step)


def _given_up(held: set[NodeShard], request: Retain | Discard) -> set[NodeShard]:
    """What a daemon forgets at a request."""
    if isinstance(request, Discard):
        return {e for e in held if e.key.step > request.step and e.key.generation <= request.invalid_generation}
    return {
        e
        for e in held
        if e.key.step not in request.steps and not (e.key.step > request.upto and e.key.step not in request.left_out)
    }
