"""A coordinator of which a test plays the nodes, the driver and the clock."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from checkpoint.protocol import (
    Cancel,
    Committed,
    DaemonNews,
    DriverRequest,
    Flushed,
    Held,
    Inventory,
    JobFailed,
    NodeShard,
    Replicate,
    Skipped,
    SnapshotKey,
    StartJob,
    Sync,
    Synced,
)
from resilient.control.coordinator import Coordinator, JobSpec, State
from resilient.control.learning import Limits
from resilient.control.stragglers import Rules
from resilient.outbox import Effect, Finish, Outbox, Quarantine, RaiseFence, RequestDaemon, Send, WriteEvent
from resilient.protocol.candidates import unpack
from resilient.protocol.messages import (
    AgentMessage,
    Alive,
    EndsFound,
    FindEnds,
    Heartbeat,
    Hello,
    Inspected,
    Inspection,
    Ready,
    Record,
    Report,
    Start,
    WorkerEnded,
)
from resilient.recovery.faults import Raised, WorkerEnd
from resilient.recovery.policy import Budget
from resilient.recovery.without_spare import Choice, Measured
from resilient.snapshots import StoragePlan, TierPlan

TICK_S = 0.5
VICTIM = Raised("RuntimeError", "gloo/transport/tcp/pair.cc: Connection closed by peer", "victim's traceback", 9.0)


def job(
    nodes: int = 2,
    *,
    spares: int = 0,
    fewer: tuple[int, ...] = (),
    stragglers: Rules | None = None,
    replace_stragglers: bool = False,
    replicas: bool = False,
    procs_per_node: int = 1,
    run_dir_patience_s: float = 900.0,
    without_spare: Choice | Literal["auto"] = "shrink",
    measured: Measured | None = None,
    end_t: float | None = None,
    layouts: Mapping[int, Mapping[str, int]] | None = None,
    min_procs_per_node: int | None = None,
    script: bool = False,
    files: tuple[str, ...] = (),
    **budget: int,
) -> JobSpec:
    return JobSpec(
        layouts=layouts or {size * procs_per_node: {"dp": size * procs_per_node} for size in (*fewer, nodes)},
        spares=spares,
        rejoin_s=20.0,
        procs_per_node=procs_per_node,
        storage=StoragePlan(TierPlan("ram", 1, replicas), (), TierPlan("scratch", 3), 2),
        budget=Budget(**{"max_restarts_per_hour": 30, "give_up_after_same_step": 3, **budget}),
        drain_s=20.0,
        silence_s=30.0,
        silence_with_spare_s=8.0,
        hang=Limits(10.0, 600.0),
        link_grace_s=60.0,
        collective_timeout_s=620.0,
        stragglers=stragglers,
        replace_stragglers=replace_stragglers,
        run_dir_patience_s=run_dir_patience_s,
        without_spare=without_spare,
        measured=measured or Measured(),
        end_t=end_t,
        min_procs_per_node=min_procs_per_node,
        script=script,
        files=files,
    )


class Play:
    """Two nodes of one rank each, unless said otherwise; arguments as for `job`.

    The driver's part is played at once: fences are raised, what is invalidated is quarantined, daemons settle.
    """

    def __init__(self, nodes: int = 2, **settings: Any) -> None:
        self.job = job(nodes, **settings)
        self.nodes = nodes + self.job.spares
        self.coordinator = Coordinator(self.job, last_generation=4)
        self.now = 1000.0
        self.effects: list[Effect] = []
        self.silent_daemons: set[int] = set()  # nodes on which daemons settle nothing
        self.slow_agents: set[int] = set()  # nodes that do not say at once that all ends were told
        self.fence: Callable[[RaiseFence], str | None] | None = lambda _: None  # its error; None: nobody answers

    # -- what happens --------------------------------------------------------------------------------------------------

    def do(self, method: str, *arguments: Any, **named: Any) -> list[Effect]:
        out = Outbox()
        getattr(self.coordinator, method)(*arguments, self.now, out, **named)
        effects = out.take()
        self.effects += effects
        for effect in list(effects):
            match effect:
                case RequestDaemon(node, Sync()) if node not in self.silent_daemons:
                    effects += self.news(node, Synced(generation=self.generation))
                case Send(node, FindEnds()) if node not in self.slow_agents:
                    effects += self.ends_found(node)
                case RaiseFence(generation) if self.fence is not None:
                    effects += self.do("fence_raised", generation, self.fence(effect))
                case Quarantine(_, generation) if self.fence is not None:
                    effects += self.do("quarantined", generation, [], None)
        return effects

    def wait(self, seconds: float, *, silent: Collection[int] = ()) -> list[Effect]:
        """Time passes; agents say that they live, but for silent ones."""
        effects: list[Effect] = []
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + TICK_S)
            for node in self.coordinator.membership.joined():
                if node not in silent:
                    effects += self.deliver(node, Alive(generation=self.generation))
            effects += self.do("tick")
        return effects

    def deliver(self, node: int, message: AgentMessage) -> list[Effect]:
        self.coordinator.check(node, message)
        return self.do("on_message", node, message)

    def hello(self, node: int, *, skew_s: float = 0.0) -> list[Effect]:
        where = {"host": f"n{node}", "addr": f"10.0.0.{node}"}
        return self.deliver(node, Hello(generation=0, node=node, incarnation=1, t=self.now + skew_s, **where))

    def ready(self, node: int, port: int = 6000, shards: Sequence[NodeShard] = ()) -> list[Effect]:
        return self.deliver(node, Ready(generation=self.generation, store_port=port, inventory=inventory(node, shards)))

    def join(self, node: int) -> list[Effect]:
        return [*self.hello(node), *self.ready(node, 5000 + node)]

    def again(self, *nodes: int, shards: dict[int, list[NodeShard]] | None = None) -> list[Effect]:
        """These nodes, or all, have ended their workers; what they hold."""
        return [
            effect for node in nodes or range(self.nodes) for effect in self.ready(node, 6000 + node, (shards or {}).get(node, ()))
        ]

    def start(self) -> None:
        self.do("begin")
        self.do("prepared")
        for node in range(self.nodes):
            self.join(node)

    def resumed(self, step: int, tier: str | None = None) -> list[Effect]:
        """Rank 0 says from where it goes on."""
        fields = {"step": step, **({"tier": tier} if tier else {})}
        return self.report(0, records=(Record(0, 1.0, "resumed", fields),))

    def report(self, node: int, **what: Any) -> list[Effect]:
        return self.deliver(node, Report(**{"generation": self.generation, **what}))

    def beat(
        self, node: int, step: int, *, silent_s: float = 0.0, state: str = "", phase: str = "step", generation: int | None = None
    ) -> list[Effect]:
        """A rank has finished a step so long ago, and shown no activity since."""
        heartbeat = beat(step, self.now - silent_s, silent_s=silent_s, state=state, phase=phase)
        return self.report(node, heartbeats={node: heartbeat}, generation=generation or self.generation)

    def exit(
        self,
        rank: int,
        exitcode: int = -9,
        raised: Raised | None = None,
        stopped: bool = False,
        step: int = 7,
        log: str = "",
        generation: int | None = None,
    ) -> list[Effect]:
        node = rank // self.job.procs_per_node
        end = WorkerEnd(rank, node, 77, exitcode, self.now, step, "step", raised, log)
        return self.deliver(node, WorkerEnded(generation=generation or self.generation, end=end, stopped=stopped))

    def ends_found(self, node: int) -> list[Effect]:
        """All that has ended on a node was told."""
        return self.deliver(node, EndsFound(generation=self.generation))

    def inspected(self, node: int, found: Inspection) -> list[Effect]:
        return self.deliver(node, Inspected(generation=self.generation, ranks={node: found}))

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def news(self, node: int, *news: DaemonNews) -> list[Effect]:
        """A node's snapshot daemon has something to say."""
        return self.report(node, news=news)

    def held(self, node: int, step: int, *, wants: Sequence[str] = (), again: int = 0) -> list[Effect]:
        """A node's shard of a snapshot is in memory."""
        members = self.coordinator.membership.members
        held = shard(step, members.index(node), of=len(members), generation=self.generation)
        costs = {"stall_s": 0.01, "write_s": 0.02}
        return self.news(node, Held(generation=self.generation, shard=held, wants=tuple(wants), again=again, **costs))

    def skipped(self, node: int, step: int) -> list[Effect]:
        return self.news(node, Skipped(generation=self.generation, step=step, reason="no buffer was free"))

    def flushed(self, request: StartJob, nodes: Sequence[int] = (0, 1)) -> list[Effect]:
        """These nodes have done their share of a flush."""
        return [
            effect
            for node in nodes
            for effect in self.news(node, Flushed(**about(request, shard=node), size_bytes=100, write_s=0.1))
        ]

    def committed(self, request: StartJob) -> list[Effect]:
        return self.news(0, Committed(**about(request, shard=0), size_bytes=200, files=81, write_s=0.1))

    def failed(self, node: int, request: Replicate, reason: str, **how: bool) -> list[Effect]:
        return self.news(node, JobFailed(**about(request), kind="replicate", reason=reason, **how))

    # -- what has come of it -------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.coordinator.generation

    def events(self, name: str, effects: list[Effect] | None = None) -> list[dict[str, Any]]:
        every = self.effects if effects is None else effects
        return [dict(e.fields) for e in every if isinstance(e, WriteEvent) and e.event == name]

    def sent(self, kind: type, effects: list[Effect] | None = None) -> list[Any]:
        """Each with `node` and `message`."""
        return [e for e in (self.effects if effects is None else effects) if isinstance(e, Send) and isinstance(e.message, kind)]

    def requests(self, kind: type[DriverRequest], effects: list[Effect] | None = None) -> list[tuple[int, Any]]:
        """What daemons were asked to do."""
        every = self.effects if effects is None else effects
        return [(e.node, e.request) for e in every if isinstance(e, RequestDaemon) and isinstance(e.request, kind)]

    def jobs(self, kind: str, effects: list[Effect] | None = None) -> list[tuple[int, StartJob]]:
        return [(node, request) for node, request in self.requests(StartJob, effects) if request.kind == kind]

    def cancelled(self, effects: list[Effect]) -> list[tuple[int, int]]:
        return [(node, request.job_id) for node, request in self.requests(Cancel, effects)]

    def finish(self) -> Finish:
        """The end, once the agents have stopped what they had to."""
        if self.coordinator.state is State.SAVING:
            for node in range(self.nodes):
                self.ready(node, 1)
        (only,) = [e for e in self.effects if isinstance(e, Finish)]
        return only


def beat(
    step: int,
    t: float = 0.0,
    *,
    silent_s: float = 0.0,
    state: str = "",
    phase: str = "step",
    phased: bool = True,
    own_s: float | None = None,
    activity_t: float | None = None,
    first: tuple[int, float] = (-1, 0.0),
) -> Heartbeat:
    active_t = t if activity_t is None else activity_t
    return Heartbeat(step, phase, t, active_t, silent_s, state, phased, own_s, False, *first)


def inventory(node: int, shards: Sequence[NodeShard] = (), *, port: int = 9) -> Inventory:
    return Inventory(generation=0, address=f"10.0.0.{node}:{port}", shards=tuple(shards))


def shard(step: int, number: int, *, of: int = 2, replica: bool = False, generation: int = 5, tier: str = "ram") -> NodeShard:
    """Of a snapshot of the generation that every play begins with."""
    return NodeShard(
        tier=tier,
        directory=f"/{tier}/{'replica/' * replica}{step}",
        key=SnapshotKey(step, generation),
        shard=number,
        shards=of,
        size_bytes=100,
        replica=replica,
    )


def about(request: StartJob | Replicate, **more: Any) -> dict[str, Any]:
    """What news of a job says of it."""
    names = ("generation", "job_id", "tier", "key", "shard")
    return {**{name: getattr(request, name) for name in names}, **more}


def candidates(start: Start) -> list[tuple[int, str]]:
    """Step and tier of what workers may go on from."""
    return [(each.key.step, each.tier) for each in unpack(start.candidates)]


def flush(play: Play, step: int, *, seconds: float) -> None:
    """A snapshot of two nodes is held, flushed, and committed after so long."""
    effects = [effect for node in (0, 1) for effect in play.held(node, step, wants=["scratch"])]
    request = play.jobs("flush", effects)[0][1]
    play.wait(seconds)
    play.flushed(request)
    play.committed(request)
