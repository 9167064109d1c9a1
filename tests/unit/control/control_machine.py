"""Nodes that join, compute, fail, are cut off and return in any order: what holds in the control core whatever happens.

Each node's messages arrive in the order in which they were sent, those of different nodes in any order; they may be late, lost with
their node, or come again from a generation that is over. What the driver's shell is asked to do is done at any time and in any
order, may fail, or is never answered. The snapshots core is the real one; daemons are played.
"""

from typing import Any

from control_agents import Agent
from control_checks import LedgerChecks, check_records, check_starts, check_way_back, newest_held
from control_play import beat, job, shard
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checkpoint.protocol import Held, Retain, Synced
from resilient.config.timeouts import ANSWER_S, FENCE_HANG_S
from resilient.control.coordinator import Coordinator, State
from resilient.control.liveness import NO_STEP
from resilient.outbox import Effect, Finish, Launch, Outbox, Quarantine, RaiseFence, RequestDaemon, Send, WriteEvent
from resilient.protocol.messages import (
    Alive,
    EndsFound,
    Health,
    HealthFinding,
    Hello,
    Inspected,
    Proposed,
    Ready,
    Record,
    Report,
    Start,
    Started,
    Stop,
    WorkerEnded,
)
from resilient.recovery.faults import Raised
from resilient.recovery.policy import Budget

NODES, SPARES = 3, 1
SIZES = (1, NODES)
SILENCE_S, SILENCE_WITH_SPARE_S = 30.0, 8.0  # as `control_play.job` has them
DRAIN_S = 20.0
TICK_S = 0.5
ROUNDING_S = 0.01
KILLED: tuple[int, Raised | None] = (-9, None)
BUG: tuple[int, Raised | None] = (1, Raised("ValueError", "boom", "a traceback", 9.0))
PEER: tuple[int, Raised | None] = (1, Raised("RuntimeError", "Connection closed by peer [10.0.0.1]:4711", "a traceback", 9.0))
BAD: tuple[int, Raised | None] = (1, Raised("BadBatch", "the loss is nan", "a traceback", 9.0, None, "not_finite", None))

nodes = st.integers(0, NODES + SPARES - 1)


class JobMachine(RuleBasedStateMachine):
    """The driver, its agents and the network between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.attended_s = 0.0  # without the time for which the driver was away
        self.agents = [Agent(node, NODES) for node in range(NODES + SPARES)]
        self.fences: list[int] = []  # that are being raised
        self.raised: set[int] = set()
        self.asked_s: dict[int, float] = {}  # when each was to be raised, attended seconds
        self.late: list[tuple[str, int]] = []  # fences and quarantines that are answered late, or never
        self.sizes: dict[int, int] = {}  # by number of the fence, of the generation that there could be
        self.quarantines: list[int] = []
        self.rolled_back = False  # and not quarantined yet
        self.holding = True  # no daemon may be told to forget anything
        self.durable: set[int] = set()
        self.past: list[tuple[int, Any]] = []
        self.finished: Finish | None = None
        self.holds = False  # nothing was found by the last call
        self.run_dir_t: float | None = None
        self.saving_t: float | None = None
        self.saving: list[Agent] = []  # the members when the job began to save
        self.stops: list[float] = []  # when they were asked for

    @initialize(
        started=st.sampled_from([True, True, False]),
        restarts=st.sampled_from([1000, 1000, 4]),
        same=st.sampled_from([1000, 1000, 3]),
    )
    def begin(self, started: bool, restarts: int, same: int) -> None:
        budget = {"max_restarts_per_hour": restarts, "give_up_after_same_step": same}
        settings = job(NODES, spares=SPARES, fewer=(1,), replicas=True, **budget)
        self.core = Coordinator(settings, last_generation=0)
        self.ledger = LedgerChecks(Budget(**budget))
        self.do("begin")
        self.do("prepared")
        if started:
            self.catch_up(4)

    # -- the driver's shell --------------------------------------------------------------------------------------------

    def do(self, method: str, *arguments: Any, **named: Any) -> list[Effect]:
        out, before, left, self.holds = Outbox(), self.core.state, self.core.membership.left(), False
        getattr(self.core, method)(*arguments, self.now, out, **named)
        effects = out.take()
        assert not (self.finished and effects), "something happens after the end"
        if self.core.state is State.SAVING and before is not State.SAVING:
            self.saving_t = self.now
            self.saving = [self.agents[node] for node in self.core.membership.members]
        self.check(effects, before, left)
        for effect in effects:
            self.carry_out(effect)
        self.holds = True
        return effects

    def check(self, effects: list[Effect], before: State, left: frozenset[int]) -> None:
        """What must hold of the effects of one call."""
        events = self.ledger.check(effects, self.now, left)
        self.rolled_back |= any(each.event == "action" and each.fields["name"] == "roll_back" for each in events)
        for each in events:
            for node in each.fields["nodes"] if each.event == "fault" and each.fields["kind"] == "node_lost" else ():  # type: ignore[attr-defined]
                self.agents[node].lost = True
        starts = [(each.node, each.message) for each in effects if isinstance(each, Send) and isinstance(each.message, Start)]
        if starts:
            self.check_starts(starts)
        for each in effects:
            stopped = isinstance(each, Send) and isinstance(each.message, Stop)
            if stopped and self.core.state in (State.GATHERING, State.FENCING):  # a job that ends forgets what is durable
                self.holding = True
            if isinstance(each, WriteEvent) and each.event == "generation_started" and each.fields["resumed_step"] is not None:
                self.holding = False
            if isinstance(each, RequestDaemon) and isinstance(each.request, Retain):
                ends = self.core.state in (State.SAVING, State.FINISHED)
                assert ends or not self.holding, "a daemon is told what to forget before the ranks go on"
            if isinstance(each, Finish) and before is State.SAVING:
                self.check_end()

    def check_starts(self, starts: list[tuple[int, Start]]) -> None:
        (generation,) = {start.generation for _, start in starts}
        assert generation in self.raised or self.hangs(generation), "a start without its fence"
        assert not self.rolled_back, "a start before what is invalid is out of the way"
        check_starts(starts, self.agents, self.core.membership.members, self.sizes[generation])
        check_way_back(starts[0][1], self.agents, self.ledger)
        self.holding = True

    def check_end(self) -> None:
        """The job ends because all is saved, or because time is over."""
        assert self.saving_t is not None
        deadline_t = (self.stops[0] if self.stops else self.saving_t) + DRAIN_S
        if self.now >= deadline_t or len(self.stops) > 1 or self.ledger.gave_up:
            return
        if any(often > 1 for often in self.ledger.silent.values()):  # nor has the daemon in its place answered: it is given up
            return
        for agent in self.saving:
            there = agent is self.agents[agent.node] and agent.joined
            assert not there or agent.synced, f"the job ends before node {agent.node} has settled what its workers left"
        newest, durable = newest_held(self.agents, self.ledger), max(self.durable, default=0)
        assert newest <= durable, f"the job ends with step {newest} in memory and step {durable} durable"

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Launch(node):
                before = self.agents[node]
                silent_s = self.attended_s - before.heard_s
                assert not before.launched or before.lost or silent_s > SILENCE_WITH_SPARE_S - ROUNDING_S, (
                    f"node {node} is started again after {silent_s} s"
                )
                held = before.held if before.joined else set()
                self.agents[node] = Agent(node, NODES, launched=True, held=held)
            case Send(node, Start() as message):
                assert not any(isinstance(each, Start) for each in self.agents[node].inbox), f"node {node} is to start twice"
                self.agents[node].ready = False
                self.agents[node].inbox.append(message)
            case Send(node, message):
                self.agents[node].inbox.append(message)
            case RequestDaemon(node, request):
                self.agents[node].inbox.append(request)
            case RaiseFence(generation):
                assert generation not in self.sizes, f"fence {generation} is raised a second time"
                fit = [agent for agent in self.agents if agent.joined and agent.ready and not agent.unfit]
                self.sizes[generation] = max(size for size in SIZES if size <= len(fit))
                self.fences.append(generation)
                self.asked_s[generation] = self.attended_s
            case Quarantine(_, generation):
                assert generation in self.raised or self.hangs(generation), "what is invalid is renamed before the fence is up"
                self.quarantines.append(generation)
            case Finish():
                self.finished = effect

    @rule(which=st.integers(0, 3), error=st.sampled_from([None] * 9 + ["no space left on device"]))
    @precondition(lambda self: self.fences)
    def fence_raised(self, which: int, error: str | None) -> None:
        self.answer_fence(which, error)

    def answer_fence(self, which: int, error: str | None) -> None:
        """The disk process does one thing after the other, but nobody relies on that."""
        generation = self.fences.pop(which % len(self.fences))
        if error is None or self.core.snapshots.may_start_without_fence:
            self.raised.add(generation)
        self.do("fence_raised", generation, error)

    @rule(which=st.integers(0, 3), error=st.sampled_from([None] * 9 + ["permission denied"]))
    @precondition(lambda self: self.quarantines)
    def quarantined(self, which: int, error: str | None) -> None:
        self.answer_quarantine(which, error)

    def answer_quarantine(self, which: int, error: str | None) -> None:
        generation = self.quarantines.pop(which % len(self.quarantines))
        self.rolled_back &= error is not None
        self.do("quarantined", generation, [(9, "rolled-back-9")] if error is None else [], error)

    @rule(quarantine=st.booleans(), chance=st.integers(0, 4))
    @precondition(lambda self: self.fences or self.quarantines)
    def a_file_system_hangs(self, quarantine: bool, chance: int) -> None:
        """What is under way is not answered in time."""
        pending = self.quarantines if quarantine else self.fences
        if pending and chance == 4:
            self.late.append(("quarantined" if quarantine else "fence_raised", pending.pop(0)))

    @rule(error=st.sampled_from([None, "it took too long"]))
    @precondition(lambda self: self.late)
    def an_answer_comes_late(self, error: str | None) -> None:
        method, generation = self.late.pop(0)
        if method == "fence_raised":
            if error is None or self.core.snapshots.may_start_without_fence:
                self.raised.add(generation)
            self.do(method, generation, error)
        else:
            self.rolled_back &= error is not None or generation != max(self.sizes)
            self.do(method, generation, [], error)

    def hangs(self, generation: int) -> bool:
        """Whether a fence was waited for long enough, where there is something to go on from."""
        waited_s = self.attended_s - self.asked_s[generation]
        told = ("fence_raised", generation) in self.late
        return waited_s >= FENCE_HANG_S + (0.0 if told else ANSWER_S)  # a shell that says nothing is waited for longer

    # -- time ----------------------------------------------------------------------------------------------------------

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.tick()

    def tick(self) -> None:
        self.now += TICK_S
        self.attended_s += TICK_S
        heard_s = {agent.node: agent.heard_s for agent in self.agents if agent.joined}
        self.tick_and_look(heard_s)
        for node, since_s in heard_s.items():
            known = self.core.membership.nodes[node].joined and not self.finished
            assert not known or self.attended_s - since_s <= SILENCE_S + TICK_S + ROUNDING_S, (
                f"the loss of node {node} is not noticed"
            )

    @rule(seconds=st.floats(2.5, 200.0))
    def driver_is_away(self, seconds: float) -> None:
        self.now += seconds
        gone = self.tick_and_look({agent.node: agent.heard_s for agent in self.agents if agent.joined})
        # At the end of a job a daemon has a share of the time that is left, and that is less now.
        faults = [each for each in gone if each.fields["kind"] != "storage"]
        assert all(str(each.fields["evidence"]).startswith("silent for") for each in faults), "a fault of the driver's own absence"

    def tick_and_look(self, heard_s: dict[int, float]) -> list[WriteEvent]:
        """A tick, by which no node is lost that was heard of late enough; its faults. Args: heard_s: of nodes with agents."""
        stands_by = any(agent.joined and agent.ready and not self.core.membership.is_member(agent.node) for agent in self.agents)
        faults = [each for each in self.do("tick") if isinstance(each, WriteEvent) and each.event == "fault"]
        for each in faults:
            if str(each.fields["evidence"]).startswith("silent for"):
                (node,) = each.fields["nodes"]  # type: ignore[misc]
                least_s = SILENCE_WITH_SPARE_S if stands_by else SILENCE_S
                assert self.attended_s - heard_s[node] > least_s - ROUNDING_S, f"node {node} is lost for nothing"
        return faults

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def catch_up(self, rounds: int) -> None:
        """Nothing is late."""
        for _ in range(rounds):
            while self.fences:
                self.answer_fence(0, None)
            while self.quarantines:
                self.answer_quarantine(0, None)
            for node in range(NODES + SPARES):
                self.join(node)
                self.obey_some(node, 99)
                self.hear(node, 99)
            self.tick()

    @rule(rounds=st.integers(1, 4))
    def all_goes_well(self, rounds: int) -> None:
        self.catch_up(rounds)

    @rule(steps=st.integers(1, 6), wanted=st.booleans())
    def it_trains(self, steps: int, wanted: bool) -> None:
        for _ in range(steps):
            self.step(True, wanted)
            self.catch_up(1)

    @rule(node=nodes, fit=st.sampled_from([True] * 5 + [False]))
    def joins(self, node: int, fit: bool) -> None:
        self.join(node, fit=fit)

    def join(self, node: int, *, fit: bool = True) -> None:
        agent = self.agents[node]
        if agent.launched and not agent.joined and not self.finished:
            agent.joined, agent.heard_s, agent.unfit = True, self.attended_s, not fit
            where = {"host": f"n{node}", "addr": f"10.0.0.{node}"}
            self.do("on_message", node, Hello(generation=0, node=node, incarnation=1, t=self.now, **where))
            if not fit:
                finding = HealthFinding(check="disk", verdict="fail", text="it is full")
                agent.outbox.append(Health(generation=0, took_s=0.1, findings=(finding,)))
            agent.say_ready()

    @rule(node=nodes, count=st.integers(1, 5))
    def is_heard(self, node: int, count: int) -> None:
        self.hear(node, count)

    def hear(self, node: int, count: int) -> None:
        """Some of what a node has said arrives."""
        agent = self.agents[node]
        for _ in range(min(count, len(agent.outbox))):
            message = agent.outbox.popleft()
            self.past.append((node, message))
            self.arrive(node, message)
            agent = self.agents[node]
        if agent.joined and not agent.outbox:
            self.arrive(node, Alive(generation=agent.generation))

    def arrive(self, node: int, message: Any) -> None:
        agent = self.agents[node]
        agent.heard_s = self.attended_s
        match message:
            case Ready():
                agent.ready = not any(isinstance(each, Start) for each in agent.inbox)
            case Report() as report:
                agent.synced |= self.saving_t is not None and any(isinstance(each, Synced) for each in report.news)
                current = report.generation == self.core.generation and self.core.state in (State.RUNNING, State.SETTLING)
                known = report.generation in self.ledger.announced or (
                    0 in report.heartbeats and report.heartbeats[0].step > NO_STEP
                )
                if current and known and any(beat.step > NO_STEP for beat in report.heartbeats.values()):
                    self.ledger.go_back_to = None
        self.core.check(node, message)
        effects = self.do("on_message", node, message)
        if isinstance(message, Report) and not self.finished:
            check_records(effects, len(message.records))

    @rule(data=st.data())
    @precondition(lambda self: self.past)
    def is_heard_again(self, data: st.DataObject) -> None:
        """What was said in a generation that is over comes once more; records are handed in again by the node's next agent."""
        node, message = data.draw(st.sampled_from(self.past))
        if message.generation >= self.core.generation or not self.agents[node].joined or self.finished:
            return
        if not isinstance(message, WorkerEnded | Proposed | Inspected | EndsFound | Started | Report):
            return
        if isinstance(message, Report):
            message = Report(generation=message.generation, heartbeats=message.heartbeats, records=message.records)
        self.agents[node].heard_s = self.attended_s
        before = self.core.state, self.core.generation, self.ledger.last_generation
        self.core.check(node, message)
        effects = self.do("on_message", node, message)
        records = message.records if isinstance(message, Report) else ()
        check_records(effects, len(records))
        assert len(effects) <= 2 * len(records), f"{message} is of a generation that is over"
        events = [each.event for each in effects if isinstance(each, WriteEvent)]
        assert not events, f"{message} is of a generation that is over, and {events} are written"
        assert before == (self.core.state, self.core.generation, self.ledger.last_generation)

    @rule(node=nodes)
    def is_lost(self, node: int) -> None:
        """Its agent ends, perhaps before it has connected."""
        agent = self.agents[node]
        if agent.launched and not self.finished:
            self.agents[node] = Agent(node, NODES)
            self.do("lost", node, "its connection was closed")

    @rule(node=nodes, count=st.integers(1, 6))
    def obeys(self, node: int, count: int) -> None:
        self.obey_some(node, count)

    def obey_some(self, node: int, count: int) -> None:
        """A node does some of what it was told."""
        agent = self.agents[node]
        for _ in range(min(count, len(agent.inbox))):
            agent.obey(self.durable, self.now, self.ledger.said.__setitem__)

    # -- workers -------------------------------------------------------------------------------------------------------

    def running(self) -> list[Agent]:
        """The nodes of the present generation, if all of its workers are there."""
        found = [agent for agent in self.agents if agent.rank is not None and agent.generation == self.core.generation]
        return found if len(found) == len(self.core.membership.members) else []

    @rule(snapshot=st.booleans(), wanted=st.booleans(), ahead=st.sampled_from([None, None, *range(NODES + SPARES)]))
    def a_step(self, snapshot: bool, wanted: bool, ahead: int | None) -> None:
        self.step(snapshot, wanted, ahead)

    def step(self, snapshot: bool, wanted: bool, ahead: int | None = None) -> None:
        """The ranks that are behind finish a step, or one node's alone: none is further ahead than that."""
        members = self.running()
        slowest = min((agent.step for agent in members), default=0)
        for agent in members:
            if agent.step > slowest or (ahead is not None and agent.node != ahead) or agent.step == agent.hold_at:
                continue
            assert agent.rank is not None
            agent.step += 1
            agent.beat_step = agent.step
            record = Record(agent.rank, self.now, None, {"step": agent.step, "loss": 1.0})
            heartbeats = {agent.rank: beat(agent.step, self.now)}
            agent.outbox.append(Report(generation=agent.generation, heartbeats=heartbeats, records=(record,)))
            if snapshot:
                held = shard(agent.step, agent.rank, of=len(members), generation=agent.generation)
                agent.held.add(held)
                agent.tell_news(Held(generation=agent.generation, shard=held, wants=("scratch",) if wanted else ()))

    @rule(node=nodes, how=st.sampled_from([KILLED, KILLED, BUG, PEER, BAD]))
    def a_worker_fails(self, node: int, how: tuple[int, Raised | None]) -> None:
        agent = self.agents[node]
        if agent.rank is not None:
            agent.end(*how, self.now, step=agent.step)

    @rule(chance=st.integers(0, 20))
    def training_ends(self, chance: int) -> None:
        members = self.running()
        if chance == 20 and members and len({agent.step for agent in members}) == 1:
            for agent in members:
                agent.end(0, None, self.now, step=agent.step)

    @rule(node=nodes, silent_s=st.floats(1.0, 700.0), state=st.sampled_from(["S", "T"]))
    def a_worker_hangs(self, node: int, silent_s: float, state: str) -> None:
        agent = self.agents[node]
        if agent.rank is not None:
            heartbeat = beat(agent.beat_step, self.now - silent_s, silent_s=silent_s, state=state)
            agent.outbox.append(Report(generation=agent.generation, heartbeats={agent.rank: heartbeat}))

    # -- beside it -----------------------------------------------------------------------------------------------------

    @rule(well=st.booleans())
    def run_dir_fails_or_is_well(self, well: bool) -> None:
        if self.run_dir_t is None or not well:
            self.run_dir_t = self.now if self.run_dir_t is None else self.run_dir_t
            self.do("run_dir_trouble", "no space left on device", self.now - 1.0)
        else:
            self.do("run_dir_well", self.now - self.run_dir_t)
            self.run_dir_t = None

    @rule(chance=st.integers(0, 30))
    def a_stop_is_asked_for(self, chance: int) -> None:
        if chance == 30 and not self.finished:
            self.stop()

    def stop(self) -> None:
        self.stops.append(self.now)
        self.do("stop", "SIGTERM")

    @invariant()
    def members_are_distinct(self) -> None:
        members = self.core.membership.members
        assert len(set(members)) == len(members)
        assert self.core.finished == (self.finished is not None)
        troubles = [name for name in self.ledger.open.values() if name == "degrade"]
        assert self.finished or len(troubles) == (self.run_dir_t is not None), "the run directory has one trouble at a time"

    # -- in the end ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Once nothing goes wrong any more, nodes that were not left come back, a generation runs, and a stop is orderly."""
        if not self.holds:
            return
        if not self.wait_until(lambda: self.core.state is State.RUNNING and bool(self.running()) and not self.core.draining):
            return
        left = self.core.membership.left()
        unfit = left.union(agent.node for agent in self.agents if agent.unfit)
        if len(unfit) <= SPARES and not self.wait_until(
            lambda: len(self.running()) == NODES and all(agent.joined or agent.node in left for agent in self.agents), trains=True
        ):
            return
        generation = self.core.generation
        self.step(True, False)
        self.catch_up(2)
        if self.core.state is not State.RUNNING or self.core.generation != generation:  # what was late has stopped the ranks
            return
        self.ledger.check_over()
        self.stop()
        if self.wait_until(lambda: False, rounds=15):
            raise AssertionError(f"a stop of ranks that are well does not come to its end: {self.core.state}")
        assert self.finished is not None
        assert "at step" in self.finished.message, f"a stop of ranks that are well ends with: {self.finished.message}"

    def wait_until(self, reached: Any, *, trains: bool = False, rounds: int = 400) -> bool:
        """Whether that comes to be; False where the job has come to its end instead."""
        for _ in range(rounds):
            if self.finished:
                return False
            if reached():
                return True
            if trains:
                self.step(True, False)
            self.catch_up(1)
        raise AssertionError(f"neither a generation nor an end comes about: {self.core.state}, {self.core.membership.members}")
