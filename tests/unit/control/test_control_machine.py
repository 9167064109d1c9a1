"""Nodes that join, compute, fail, are cut off and return in any order: what holds in the control core whatever happens.

Each node's messages arrive in the order in which they were sent, those of different nodes in any order; they may be late, lost with
their node, or come again from a generation that is over. The snapshots core is the real one; daemons are played.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from control_play import beat, inventory, job, shard
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpoint.protocol import (
    Committed,
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
from resilient.control.coordinator import Coordinator, State
from resilient.faults import Raised, WorkerEnd
from resilient.outbox import Effect, Finish, Launch, Outbox, Quarantine, RaiseFence, RequestDaemon, Send, WriteEvent
from resilient.protocol.messages import (
    AgentMessage,
    Alive,
    Arm,
    DriverMessage,
    Hello,
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
    unpack,
)

NODES, SPARES = 3, 1
DRIVERS_OWN = {"generation_started", "fault", "action", "recovered", "drain", "run_finished"}
KILLED: tuple[int, Raised | None] = (-9, None)
BUG: tuple[int, Raised | None] = (1, Raised("ValueError", "boom", "a traceback", 9.0))
BAD: tuple[int, Raised | None] = (1, Raised("BadBatch", "the loss is nan", "a traceback", 9.0, None, "not_finite", None))


@dataclass
class Agent:
    """A node as it is. Attributes: rank: of its worker, while it has one; ready: it has said so since its last `Start`."""

    launched: bool = False
    joined: bool = False
    ready: bool = False
    generation: int = 0
    rank: int | None = None
    step: int = 0
    held: set[NodeShard] = field(default_factory=set)
    inbox: deque[DriverMessage | DriverRequest] = field(default_factory=deque)
    outbox: deque[AgentMessage] = field(default_factory=deque)


class JobMachine(RuleBasedStateMachine):
    """The driver, its agents and the network between them."""

    def __init__(self) -> None:
        super().__init__()
        settings = job(NODES, spares=SPARES, fewer=(1,), replicas=True, max_restarts_per_hour=1000, give_up_after_same_step=1000)
        self.core = Coordinator(settings, last_generation=0)
        self.now = 1000.0
        self.agents = [Agent() for _ in range(NODES + SPARES)]
        self.fences: list[int] = []  # that are being raised
        self.raised: set[int] = set()
        self.quarantines: list[int] = []
        self.rolled_back = False  # and not quarantined yet
        self.holding = True  # no daemon may be told to forget anything
        self.durable: set[int] = set()
        self.past: list[tuple[int, AgentMessage]] = []
        self.faults: set[str] = set()
        self.last_generation = 0
        self.finished = False
        self.run_dir_t: float | None = None

    # -- the driver's shell --------------------------------------------------------------------------------------------

    def do(self, method: str, *arguments: Any, **named: Any) -> list[Effect]:
        out = Outbox()
        getattr(self.core, method)(*arguments, self.now, out, **named)
        effects = out.take()
        assert not (self.finished and effects), "something happens after the end"
        self.check(effects)
        for effect in effects:
            self.carry_out(effect)
        return effects

    def check(self, effects: list[Effect]) -> None:
        """What must hold of the effects of one call."""
        events = [each for each in effects if isinstance(each, WriteEvent) and each.event in DRIVERS_OWN]
        for event in events:
            assert event.generation >= self.last_generation, f"{event} after generation {self.last_generation}"
            self.last_generation = event.generation
        faults = [str(each.fields["fault_id"]) for each in events if each.event == "fault"]
        answered = {each.fields["fault_id"] for each in events if each.event == "action"}
        assert len(set(faults)) == len(faults) and not self.faults & set(faults), "two faults with one id"
        assert set(faults) <= answered, "a fault without an action"
        self.faults |= set(faults)
        if any(each.event == "action" and each.fields["name"] == "roll_back" for each in events):
            self.rolled_back = True
        starts = [(each.node, each.message) for each in effects if isinstance(each, Send) and isinstance(each.message, Start)]
        if starts:
            self.check_starts(starts, effects)
        stopped = any(isinstance(each, Send) and isinstance(each.message, Stop) for each in effects)
        if stopped and self.core.state in (State.GATHERING, State.FENCING):  # a job that ends forgets what is durable
            self.holding = True
        for each in effects:
            if isinstance(each, WriteEvent) and each.event == "generation_started" and each.fields["resumed_step"] is not None:
                self.holding = False
            if isinstance(each, RequestDaemon) and isinstance(each.request, Retain):
                ends = self.core.state in (State.SAVING, State.FINISHED)
                assert ends or not self.holding, "a daemon is told what to forget before the ranks go on"

    def check_starts(self, starts: list[tuple[int, Start]], effects: list[Effect]) -> None:
        (generation,) = {start.generation for _, start in starts}
        assert generation in self.raised, "a start without its fence"
        assert not self.rolled_back, "a start before what is invalid is out of the way"
        assert [start.node_rank for _, start in starts] == list(range(len(starts))) and len(starts) in (1, NODES)
        for node, _ in starts:
            assert self.agents[node].joined and self.agents[node].ready, f"a start to node {node}, which is not ready"
        for node, agent in enumerate(self.agents):
            started = any(isinstance(each, Start) for each in agent.inbox)
            assert not agent.joined or not started, f"node {node} was told to start twice"
            assert not agent.joined or agent.ready, f"node {node} may still run generation {agent.generation}"
        self.holding = True

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Launch(node):
                self.agents[node] = Agent(launched=True, held=self.agents[node].held if self.agents[node].joined else set())
            case Send(node, Start() as message):
                self.agents[node].ready = False
                self.agents[node].inbox.append(message)
            case Send(node, message):
                self.agents[node].inbox.append(message)
            case RequestDaemon(node, request):
                self.agents[node].inbox.append(request)
            case RaiseFence(generation):
                assert generation not in self.fences and generation not in self.raised
                self.fences.append(generation)
            case Quarantine(_, generation):
                assert generation in self.raised, "what is invalid is renamed before the fence is up"
                self.quarantines.append(generation)
            case Finish():
                self.finished = True

    @rule(error=st.sampled_from([None] * 9 + ["no space left on device"]))
    @precondition(lambda self: self.fences)
    def fence_raised(self, error: str | None) -> None:
        self.answer_fence(error)

    def answer_fence(self, error: str | None) -> None:
        generation = self.fences.pop(0)
        if error is None or self.core.snapshots.may_start_without_fence:
            self.raised.add(generation)
        self.do("fence_raised", generation, error)

    @rule(error=st.sampled_from([None] * 9 + ["permission denied"]))
    @precondition(lambda self: self.quarantines)
    def quarantined(self, error: str | None) -> None:
        self.answer_quarantine(error)

    def answer_quarantine(self, error: str | None) -> None:
        generation = self.quarantines.pop(0)
        self.rolled_back &= error is not None
        self.do("quarantined", generation, [(9, "rolled-back-9")] if error is None else [], error)

    # -- time ----------------------------------------------------------------------------------------------------------

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick(0.5)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do("tick")

    @rule(seconds=st.floats(2.5, 200.0))
    def driver_is_away(self, seconds: float) -> None:
        self.now += seconds
        effects = self.do("tick")
        gone = [each for each in effects if isinstance(each, WriteEvent) and each.event == "fault"]
        assert not gone, "a fault of the driver's own absence"

    # -- nodes ---------------------------------------------------------------------------------------------------------

    @initialize(started=st.sampled_from([True, True, False]))
    def begin(self, started: bool) -> None:
        self.do("begin")
        self.do("prepared")
        if started:
            self.catch_up(4)

    def catch_up(self, rounds: int) -> None:
        """Nothing is late."""
        for _ in range(rounds):
            while self.fences:
                self.answer_fence(None)
            while self.quarantines:
                self.answer_quarantine(None)
            for node in range(NODES + SPARES):
                self.join(node)
                self.obey_some(node, 99)
                self.hear(node, 99)
            self.tick(0.5)

    @rule(rounds=st.integers(1, 4))
    def all_goes_well(self, rounds: int) -> None:
        self.catch_up(rounds)

    @rule(steps=st.integers(1, 6), wanted=st.booleans())
    def it_trains(self, steps: int, wanted: bool) -> None:
        for _ in range(steps):
            self.step(True, wanted)
            self.catch_up(1)

    @rule(node=st.integers(0, NODES + SPARES - 1))
    def joins(self, node: int) -> None:
        self.join(node)

    def join(self, node: int) -> None:
        agent = self.agents[node]
        if agent.launched and not agent.joined and not self.finished:
            agent.joined = True
            where = {"host": f"n{node}", "addr": f"10.0.0.{node}"}
            self.do("on_message", node, Hello(generation=0, node=node, incarnation=1, token="", t=self.now, **where))
            self.say_ready(node)

    def say_ready(self, node: int) -> None:
        agent = self.agents[node]
        agent.rank = None
        held = sorted(agent.held, key=lambda each: (each.key, each.shard))
        self.say(node, Ready(generation=agent.generation, store_port=5000, inventory=inventory(node, held)))

    def say(self, node: int, message: AgentMessage) -> None:
        self.agents[node].outbox.append(message)

    @rule(node=st.integers(0, NODES + SPARES - 1), count=st.integers(1, 5))
    def is_heard(self, node: int, count: int) -> None:
        self.hear(node, count)

    def hear(self, node: int, count: int) -> None:
        """Some of what a node has said arrives."""
        agent = self.agents[node]
        for _ in range(min(count, len(agent.outbox))):
            message = agent.outbox.popleft()
            if isinstance(message, Ready):
                agent.ready = not any(isinstance(each, Start) for each in agent.inbox)
            self.past.append((node, message))
            self.do("on_message", node, message)
            agent = self.agents[node]
        if agent.joined and not agent.outbox:
            self.do("on_message", node, Alive(generation=agent.generation))

    @rule(data=st.data())
    @precondition(lambda self: self.past)
    def is_heard_again(self, data: st.DataObject) -> None:
        """What was said in a generation that is over comes once more."""
        node, message = data.draw(st.sampled_from(self.past))
        if message.generation >= self.core.generation or not self.agents[node].joined:
            return
        if not isinstance(message, WorkerEnded | Proposed | Inspected | Started | Report):
            return
        if isinstance(message, Report):
            message = Report(generation=message.generation, heartbeats=message.heartbeats)
        assert not self.do("on_message", node, message), f"{message} is of a generation that is over"

    @rule(node=st.integers(0, NODES + SPARES - 1))
    def is_lost(self, node: int) -> None:
        agent = self.agents[node]
        if agent.joined and not self.finished:
            self.agents[node] = Agent()
            self.do("lost", node, "its connection was closed")

    @rule(node=st.integers(0, NODES + SPARES - 1), count=st.integers(1, 6))
    def obeys(self, node: int, count: int) -> None:
        self.obey_some(node, count)

    def obey_some(self, node: int, count: int) -> None:
        """A node does some of what it was told."""
        agent = self.agents[node]
        for _ in range(min(count, len(agent.inbox))):
            self.obey(node, agent, agent.inbox.popleft())

    def obey(self, node: int, agent: Agent, message: DriverMessage | DriverRequest) -> None:
        match message:
            case Start():
                agent.generation, agent.rank = message.generation, message.node_rank
                newest = max((each.key.step for each in unpack(message.candidates)), default=0)
                reachable = [0, newest, *self.durable]
                agent.step = max(step for step in reachable if message.go_back_to is None or step <= message.go_back_to)
                self.say(node, Started(generation=agent.generation, pids={agent.rank: 7}))
                if agent.rank == 0:
                    record = Record(0, self.now, "resumed", {"step": agent.step, "tier": "ram"})
                    self.say(node, Report(generation=agent.generation, records=(record,)))
            case Stop() if message.generation == agent.generation:
                self.say_ready(node)
            case Propose() if agent.rank is not None:
                self.say(node, Proposed(generation=agent.generation, checked=agent.step))
            case Arm() if agent.rank is not None:
                self.end(node, agent, 0, None, step=message.target, stopped=True)
            case Inspect() if agent.rank is not None:
                found = Inspection(state="S", cpu=0.0, stacks="")
                self.say(node, Inspected(generation=agent.generation, ranks={agent.rank: found}))
            case Shutdown():
                agent.rank = None
            case Sync() | StartJob() | Replicate() | Retain() | Discard():
                self.ask_daemon(node, agent, message)

    def ask_daemon(self, node: int, agent: Agent, request: DriverRequest) -> None:
        match request:
            case Sync():
                self.say(node, Report(generation=agent.generation, news=(Synced(generation=agent.generation),)))
            case StartJob():
                about = {name: getattr(request, name) for name in ("generation", "job_id", "tier", "key", "shard")}
                if request.kind == "flush":
                    news: Any = Flushed(**about, size_bytes=100, write_s=0.1)
                else:
                    news = Committed(**about, size_bytes=300, files=3, write_s=0.1)
                    self.durable.add(request.key.step)
                self.say(node, Report(generation=agent.generation, news=(news,)))
            case Replicate():
                copy = shard(request.key.step, request.shard, of=NODES, generation=request.key.generation, replica=True)
                agent.held.add(copy)
                news = Held(generation=request.generation, shard=copy, job_id=request.job_id)
                self.say(node, Report(generation=agent.generation, news=(news,)))
            case Retain():
                agent.held = {
                    each
                    for each in agent.held
                    if each.key.step in request.steps or (each.key.step > request.upto and each.key.step not in request.left_out)
                }
            case Discard():
                invalid = {e for e in agent.held if e.key.step > request.step and e.key.generation <= request.invalid_generation}
                agent.held -= invalid
                self.durable = {step for step in self.durable if step <= request.step}

    # -- workers -------------------------------------------------------------------------------------------------------

    def running(self) -> list[int]:
        """The nodes of the present generation, if all of its workers are there."""
        found = [
            node for node, agent in enumerate(self.agents) if agent.rank is not None and agent.generation == self.core.generation
        ]
        return found if len(found) == self.core.membership.size else []

    @rule(snapshot=st.booleans(), wanted=st.booleans())
    def a_step(self, snapshot: bool, wanted: bool) -> None:
        self.step(snapshot, wanted)

    def step(self, snapshot: bool, wanted: bool) -> None:
        members = self.running()
        for node in members:
            agent = self.agents[node]
            assert agent.rank is not None
            agent.step += 1
            heartbeats = {agent.rank: beat(agent.step, self.now)}
            self.say(node, Report(generation=agent.generation, heartbeats=heartbeats))
            if snapshot:
                held = shard(agent.step, agent.rank, of=len(members), generation=agent.generation)
                agent.held.add(held)
                news = Held(generation=agent.generation, shard=held, wants=("scratch",) if wanted else ())
                self.say(node, Report(generation=agent.generation, news=(news,)))

    @rule(node=st.integers(0, NODES + SPARES - 1), how=st.sampled_from([KILLED, KILLED, BUG, BAD]))
    def a_worker_fails(self, node: int, how: tuple[int, Raised | None]) -> None:
        agent = self.agents[node]
        if agent.rank is not None:
            self.end(node, agent, *how, step=agent.step)

    def end(self, node: int, agent: Agent, code: int, raised: Raised | None, *, step: int, stopped: bool = False) -> None:
        assert agent.rank is not None
        end = WorkerEnd(agent.rank, node, 7, code, self.now, step, "step", raised)
        self.say(node, WorkerEnded(generation=agent.generation, end=end, stopped=stopped))
        agent.rank = None

    @rule(node=st.integers(0, NODES + SPARES - 1), silent_s=st.floats(1.0, 700.0), state=st.sampled_from(["S", "T"]))
    def a_worker_hangs(self, node: int, silent_s: float, state: str) -> None:
        agent = self.agents[node]
        if agent.rank is not None:
            heartbeat = beat(agent.step, self.now - silent_s, silent_s=silent_s, state=state)
            self.say(node, Report(generation=agent.generation, heartbeats={agent.rank: heartbeat}))

    # -- beside it -----------------------------------------------------------------------------------------------------

    @rule()
    def run_dir_fails_or_is_well(self) -> None:
        if self.run_dir_t is None:
            self.run_dir_t = self.now
            self.do("run_dir_trouble", "no space left on device", self.now - 1.0)
        else:
            self.do("run_dir_well", self.now - self.run_dir_t)
            self.run_dir_t = None

    @rule(chance=st.integers(0, 30))
    def a_stop_is_asked_for(self, chance: int) -> None:
        if chance == 30 and not self.finished:
            self.do("stop", "SIGTERM")

    @invariant()
    def members_are_distinct(self) -> None:
        members = self.core.membership.members
        assert len(set(members)) == len(members)
        assert self.core.finished == self.finished

    def teardown(self) -> None:
        """Once nothing goes wrong any more, a generation runs, or the job comes to its end."""
        for _ in range(300):
            if self.finished or (self.core.state is State.RUNNING and self.running() and not self.core.draining):
                return
            self.catch_up(1)
        raise AssertionError(f"neither a generation nor an end comes about: {self.core.state}")


JobMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_whatever_happens_the_invariants_of_a_job_hold = JobMachine.TestCase
