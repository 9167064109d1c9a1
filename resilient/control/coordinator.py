"""The coordinator: one job from its beginning to its end, as a state machine without input or output.

Messages, losses, signals and the clock go in; effects are appended to the outbox that is passed in (`resilient.outbox`), and the
driver carries them out. So every course of events can be played in a test without a process.

It dispatches: what is known and decided is in the other modules of this package, each of which owns its own. What agents tell goes
to `nodes` and `workers`. A generation gathers, is fenced, and runs (`generations`). Faults are found in what workers and nodes do
(`ends`, `liveness`, `inspection`, `presence`, `stragglers`) and answered (`response`). The end is `shutdown`'s.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from typing import Literal

from checkpoint.framing import NotAMessage
from resilient.control import generations
from resilient.control.attendance import Attendance, Moment
from resilient.control.core import core_of
from resilient.control.evidence import Evidence
from resilient.control.job import JobSpec
from resilient.control.nodes import Nodes
from resilient.control.response import Response
from resilient.control.workers import Workers
from resilient.exits import Exit
from resilient.outbox import Outbox, WriteEvent
from resilient.protocol.messages import (
    AgentMessage,
    EndsFound,
    Health,
    Hello,
    Inspected,
    LinksChanged,
    Proposed,
    Ready,
    Report,
    SignalReceived,
    Started,
    WorkerEnded,
)
from resilient.recovery.faults import Fault
from resilient.recovery.policy import Action

__all__ = ["Coordinator", "JobSpec", "State"]

RUN_DIR_DRAIN = "run_dir_patience_s"  # by what a drain was asked for, as it stands in the ledger


class State(Enum):
    """Of the job. SETTLING: it is RUNNING, but a worker has failed in a way that blames a peer, who may still be heard of."""

    GATHERING = auto()
    FENCING = auto()
    RUNNING = auto()
    SETTLING = auto()
    SAVING = auto()
    FINISHED = auto()


class Coordinator:
    """See the module. `now` is unix seconds everywhere. Once `finished`, nothing is appended to any outbox."""

    def __init__(self, job: JobSpec, *, last_generation: int) -> None:
        self._core = core = core_of(job, last_generation)
        self._attendance = Attendance()
        self._response = Response(core)
        self._workers, self._nodes = Workers(core, self._response), Nodes(core, self._response)
        self.job, self.snapshots = job, core.snapshots
        self.membership, self.links, self.incidents = core.membership, core.links, core.incidents

    @property
    def state(self) -> State:
        if self._core.shutdown.finished:
            return State.FINISHED
        if self._core.shutdown.saving is not None:
            return State.SAVING
        return State.SETTLING if self._core.ends.settling else State[self._core.generations.state.name]

    @property
    def generation(self) -> int:
        """Of the last start."""
        return self._core.generations.generation

    @property
    def finished(self) -> bool:
        return self._core.shutdown.finished

    @property
    def draining(self) -> bool:
        """Whether a stop is under way."""
        return self._core.shutdown.drain is not None

    def drain_estimate_s(self) -> float | None:
        """How long a step, a snapshot of it, and its flush have taken last; None before all three are known."""
        return self._core.shutdown.drain_estimate_s()

    # -- the job -------------------------------------------------------------------------------------------------------

    def begin(self, now: float, out: Outbox) -> None:
        """The first of all calls."""
        for change in self._core.job.changes:
            out.append(WriteEvent("config_changed", change, self.generation))
        self._core.generations.begin(self._attendance.note(now), out)

    def prepared(self, now: float, out: Outbox) -> None:
        """What the entry point prepares once per job is there: generations may start."""
        when = self._attendance.note(now)
        self._core.generations.prepared()
        self._nodes.gather(when, out)

    def stop(self, signal_name: str, now: float, out: Outbox, *, until_t: float | None = None) -> None:
        """A stop is asked for. The first drains, the second ends the run at once.

        Args:
            until_t: when the drain must be over, unix seconds; None: as the config says.
        """
        when = self._attendance.note(now)
        if not self.finished:
            self._core.shutdown.stop(signal_name, when, out, until_t=until_t)

    def limit_is(self, end_t: float | None, now: float, _: Outbox) -> None:
        """The end of the job's time has changed: that it has now, unix seconds; None: it has no limit."""
        self._attendance.note(now)
        self._core.shutdown.limit_is(end_t)

    def evacuate(self, nodes: Mapping[int, str], resumed: Collection[int], now: float, out: Outbox) -> None:
        """These nodes, and no others but those that are ill, are to be left, and stay so. Args: resumed: that may be used again."""
        when = self._attendance.note(now)
        if not self.finished:
            self._core.evacuation.want(nodes, resumed, when, out)

    def departed(self, nodes: Sequence[int], now: float, out: Outbox) -> None:
        """The scheduler has taken these nodes out of the job: the run goes on without them."""
        self._nodes.departed(nodes, self._attendance.note(now), out)

    def run_out(self, kind: Literal["preempted", "time_limit"], detail: str, now: float, out: Outbox, *, until_t: float) -> None:
        """The job's time is nearly over, or its nodes are wanted back: drain until then; a drain that is under way hurries."""
        when = self._attendance.note(now)
        if self.finished:
            return
        if self.draining:
            self.hurry(until_t)
            return
        fault = Fault(self.incidents.next_id(self.generation), kind, kind, (), (), None, detail, "", 0.0)
        action = Action("finish_drain", "the state is made durable while there is time")
        self.incidents.report(fault, action, now, self.generation, out)
        self._core.shutdown.stop(kind, when, out, until_t=until_t)

    def hurry(self, until_t: float) -> None:
        """A drain that is under way must be over by then, unix seconds."""
        self._core.shutdown.hurry(until_t)

    def give_up(self, code: Exit, message: str, now: float, out: Outbox) -> None:
        """End the run for a reason that lies outside the coordinator."""
        self._core.shutdown.finish(code, message, self._attendance.note(now), out)

    def tick(self, now: float, out: Outbox) -> None:
        """Time has passed: several times a second."""
        when = self._attendance.note(now)
        if self.finished:
            return
        self._core.generations.launch(when, out)
        self._nodes.overdue(when, out)
        self._nodes.inquire(when, out)
        running = self._core.generations.state is generations.State.RUNNING
        if running and self._core.ends.settled(when.attended_s):
            self._response.blame(when, out)
        self._workers.judge(when, out)
        self._workers.await_first_step(when, out)
        if not self.finished:
            before = self.generation
            self._fenced(before, self._core.generations.unanswered(when, out), when, out)
        if not self.finished and self._core.evacuation.overdue(when, out):
            self._response.evacuate(when, out)
        self._nodes.gather(when, out)
        self._nodes.give_up_if_hopeless(when, out)
        why = self._core.run_dir.unbearable(when.attended_s, self.job.run_dir_patience_s)
        if why is not None and not self.draining and not self.finished:
            self._core.shutdown.stop(RUN_DIR_DRAIN, when, out, until_t=None, code=Exit.UNUSABLE, why=why)
        self._core.shutdown.tick(when, out)

    # -- what effects have come to -------------------------------------------------------------------------------------

    def fence_raised(self, generation: int, error: str | None, now: float, out: Outbox) -> None:
        """`RaiseFence` is done, or has failed."""
        when, before = self._attendance.note(now), self.generation
        if not self.finished:
            self._fenced(before, self._core.generations.fence_raised(generation, error, when, out), when, out)

    def quarantined(self, generation: int, renamed: Sequence[tuple[int, str]], error: str | None, now: float, out: Outbox) -> None:
        """`Quarantine` is done, or has failed. Args: renamed: step and new name."""
        when, before = self._attendance.note(now), self.generation
        if not self.finished:
            self._fenced(before, self._core.generations.quarantined(generation, renamed, error, when, out), when, out)

    def _fenced(self, before: int, failure: str | None, when: Moment, out: Outbox) -> None:
        if failure is not None:
            self._core.shutdown.finish(Exit.UNUSABLE, failure, when, out)
        elif self.generation != before:
            self._core.watchdog.begin(self.job.rate(self._core.generations.world_size))
            self._core.inspector.drop()
            self._core.first_step.begin(when.attended_s)
            self._core.ends.begin(self._core.generations.world_size)
            if self._core.stragglers is not None:
                self._core.stragglers.begin(self._core.generations.place_ranks, self._core.generations.longer_ranks)

    def run_dir_trouble(self, detail: str, since_t: float, now: float, out: Outbox) -> None:
        """The run directory cannot be written since then (unix seconds)."""
        when = self._attendance.note(now)
        if self.finished:
            return
        fault = self._core.run_dir.trouble(
            self.incidents.next_id(self.generation), detail, max(0.0, now - since_t), when.attended_s
        )
        if fault is not None:
            self._response.on_fault_beside(fault, when, out)

    def run_dir_well(self, down_s: float, now: float, out: Outbox) -> None:
        """The run directory can be written again. Args: down_s: it could not for so long; training did not stand still."""
        self._attendance.note(now)
        over = self._core.run_dir.well()
        if over is not None and not self.finished:
            self.incidents.recovered(over, self._core.generations.last_step, now, self.generation, out, down_s=down_s)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def check(self, node: int, message: AgentMessage) -> None:
        """Whether a node may say this: in the generation that runs, it speaks of its own ranks alone. Raises NotAMessage."""
        if message.generation != self.generation or self._core.generations.state is not generations.State.RUNNING:
            return
        own = self.membership.assignment.ranks(node)
        strangers = [rank for rank in _ranks_of(message) if rank not in own]
        if strangers:
            raise NotAMessage(f"not a message of its own: it is about rank {strangers[0]}, and the node has {_listed(own)}")

    def on_message(self, node: int, message: AgentMessage, now: float, out: Outbox) -> None:
        """News from a node's agent. What speaks of a generation that is over is ignored, except records and news of the daemon."""
        when = self._attendance.note(now)
        self._core.presence.on_message(node, when.attended_s)
        if self.finished:
            return
        current = message.generation == self.generation
        running = current and self._core.generations.state is generations.State.RUNNING
        match message:
            case Report():
                self._workers.on_report(node, message, running, when, out)
            case Hello():
                self._nodes.on_hello(node, message, when)
            case Health():
                self._nodes.on_health(node, message, when, out)
            case Ready():
                self._nodes.on_ready(node, message, when, out)
            case SignalReceived():
                self._core.shutdown.begin(message.name, when, out)
            case LinksChanged():
                self._nodes.on_links_changed(node, message, when, out)
            case Started() if running:
                self._core.generations.propose_to(node, out)
            case Proposed() if running:
                self._core.generations.proposed(node, message.checked, out)
            case WorkerEnded() if running:
                self._workers.on_worker_ended(message, when, out)
            case Inspected() if running:
                self._workers.on_inspected(node, message, when, out)
            case EndsFound() if running:
                self._core.ends.answered(node)

    def lost(self, node: int, detail: str, now: float, out: Outbox) -> None:
        """A node's agent has ended, or its connection has."""
        when = self._attendance.note(now)
        if not self.finished:
            self._nodes.lost(node, detail, when, out)
            self._nodes.give_up_if_hopeless(when, out)

    def failing(self, node: int, now: float, _: Outbox) -> None:
        """A node's agent has told an error that it ends with; it is lost when its connection ends. Its peers are not to blame."""
        when = self._attendance.note(now)
        if not self.finished and self.membership.is_member(node):
            self._core.ends.expect_loss(when.attended_s)

    def inquired(self, found: Sequence[Evidence], now: float, out: Outbox) -> None:
        """`InquireAbout` is done."""
        self._nodes.inquired(found, self._attendance.note(now), out)


def _ranks_of(message: AgentMessage) -> Collection[int]:
    """The ranks of which a message says what they do; records may be of a generation that is over."""
    match message:
        case Report(heartbeats=heartbeats):
            return heartbeats
        case Inspected(ranks=ranks):
            return ranks
        case Started(pids=pids):
            return pids
        case WorkerEnded(end=end):
            return (end.rank,)
    return ()


def _listed(own: range) -> str:
    return f"{own.start} to {own.stop - 1}" if own else "none"
