"""The coordinator: one job from its beginning to its end, as a state machine without input or output.

Messages, losses, signals and the clock go in; effects are appended to the outbox that is passed in (`resilient.outbox`), and the
driver carries them out. So every course of events can be played in a test without a process.

It dispatches: what is known and decided is in the other modules of this package, each of which owns its own. A generation gathers,
is fenced, and runs (`generations`). Faults are found in what workers and nodes do (`ends`, `liveness`, `inspection`, `presence`,
`stragglers`) and answered (`response`). The end is `shutdown`'s.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Literal

from checkpoint.framing import NotAMessage
from resilient.control import fitness, generations
from resilient.control.attendance import Attendance, Moment
from resilient.control.core import core_of
from resilient.control.evidence import DEPARTED, SILENT_S, Evidence, proof
from resilient.control.job import JobSpec
from resilient.control.membership import LAUNCH_ATTEMPTS, STUCK_S
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
from resilient.recovery.policy import ILL, UNFIT, Action

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
        self._workers = Workers(core, self._response)
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
        self._gather(when, out)

    def stop(self, signal_name: str, now: float, out: Outbox, *, until_t: float | None = None) -> None:
        """A stop is asked for. The first drains, the second ends the run at once.

        Args:
            until_t: when the drain must be over, unix seconds; None: as the config says.
        """
        when = self._attendance.note(now)
        if not self.finished:
            self._core.shutdown.stop(signal_name, when, out, until_t=until_t)

    def evacuate(self, nodes: Mapping[int, str], resumed: Collection[int], now: float, out: Outbox) -> None:
        """These nodes, and no others but those that are ill, are to be left, and stay so. Args: resumed: that may be used again."""
        when = self._attendance.note(now)
        if not self.finished:
            self._core.evacuation.want(nodes, resumed, when, out)

    def departed(self, nodes: Sequence[int], now: float, out: Outbox) -> None:
        """The scheduler has taken these nodes out of the job: the run goes on without them."""
        when = self._attendance.note(now)
        for node in nodes:
            self._depart(node, when, out)
        self._gather(when, out)
        self._give_up_if_hopeless(when, out)

    def _depart(self, node: int, when: Moment, out: Outbox) -> None:
        if self.finished or self.membership.has_departed(node):
            return
        if self.membership.nodes[node].joined:
            self._lost(node, DEPARTED, when, out)
        self.membership.depart(node, DEPARTED, when.attended_s)
        reason = f"node {node} has left the job: it is not waited for, and no agent is started there any more"
        self.incidents.follow_up("departed", reason, when.now, self.generation, out)

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
        spare, job = self.membership.spare(), self.job
        least_s = min(job.silence_s, job.silence_with_spare_s)

        def limit_s(node: int) -> float:
            return job.silence_with_spare_s if spare is not None and self.membership.is_member(node) else job.silence_s

        for node in self._core.presence.overdue(when.attended_s, limit_s, least_s=least_s):
            self._lost(node, f"silent for {self._core.presence.silent_s(node, when.attended_s):.0f} s", when, out)
        for node in self.membership.stuck(when.attended_s):
            what = "the entry point is not imported, or the node not checked"
            self._lost(node, f"its agent answers, but was not ready within {STUCK_S:.0f} s: {what}", when, out)
        self._inquire(when, out)
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
        self._gather(when, out)
        self._give_up_if_hopeless(when, out)
        why = self._core.run_dir.unbearable(when.attended_s, job.run_dir_patience_s)
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
            self._core.watchdog.begin()
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
        own = self.membership.ranks(node)
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
                skew_s = message.t - now
                if skew_s < 0:  # it may be late, and not its clock
                    skew_s = min(0.0, skew_s + when.late_s)
                place = self._core.job.places.get(message.host.partition(".")[0], message.place)
                self.membership.hello(node, message.host, message.addr, when.attended_s, skew_s=skew_s, place=place)
                self._core.presence.joined(node, when.attended_s)
            case Health():
                self._on_health(node, message, when, out)
            case Ready():
                self._on_ready(node, message, when, out)
            case SignalReceived():
                self._core.shutdown.stop(message.name, when, out, until_t=None)
            case LinksChanged():
                self._on_links_changed(node, message, when, out)
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

    def _on_ready(self, node: int, message: Ready, when: Moment, out: Outbox) -> None:
        self.membership.is_ready(node, message.store_port)
        self.snapshots.inventory(node, message.inventory)
        if self._core.shutdown.saving is not None:
            self._core.shutdown.sync(node, when, out)
            return
        self._core.generations.stand_by()
        self._gather(when, out)

    def _on_health(self, node: int, message: Health, when: Moment, out: Outbox) -> None:
        """A node has been checked. One that is not fit is left out, but its agent lives, for what it holds."""
        known = self.membership.nodes[node]
        found = fitness.judge(f"node {node} ({known.host})", message, known.skew_s)
        if found.event is not None:
            out.event("health", {"node": node, **found.event}, self.generation, when.now, known.host)
        if self._core.shutdown.saving is not None:  # no ranks are wanted any more, but what it holds is
            return
        if found.dead and not self.membership.is_left(node):
            why = found.unfit or found.ill or ""
            if found.dead <= known.dead or self._response.leave_out(node, found.dead, why, when, out):
                self._core.generations.left(node)
                self._gather(when, out)
                return
        if found.ill is not None and not self._core.evacuation.concerns(node):
            self._response.on_fault_beside(self._response.node_lost(node, ILL, found.ill, found.ill, 0.0), when, out)
            self._core.evacuation.is_ill(node, found.ill)
        if found.unfit is None or self.membership.is_left(node):  # that one takes no part in any case
            return
        fault = self._response.node_lost(node, UNFIT, found.unfit, found.unfit, 0.0)
        self.membership.refused(node, found.unfit)
        self._core.generations.left(node)
        self._response.on_fault_beside(fault, when, out)
        self._gather(when, out)
        self._give_up_if_hopeless(when, out)

    def _on_links_changed(self, node: int, message: LinksChanged, when: Moment, out: Outbox) -> None:
        for change in message.changes:
            self.links.changed(node, change, when.now)
            fields = {
                "node": node,
                "interface": change.interface,
                "state": change.state,
                "down_s": round(change.down_s, 3) if change.down_s is not None else None,
                "detail": change.detail,
                "counters": dict(change.counters),
            }
            out.event("link", fields, self.generation, message.t, self.membership.nodes[node].host)

    def lost(self, node: int, detail: str, now: float, out: Outbox) -> None:
        """A node's agent has ended, or its connection has."""
        when = self._attendance.note(now)
        if not self.finished:
            self._lost(node, detail, when, out)
            self._give_up_if_hopeless(when, out)

    def failing(self, node: int, now: float, _: Outbox) -> None:
        """A node's agent has told an error that it ends with; it is lost when its connection ends. Its peers are not to blame."""
        when = self._attendance.note(now)
        if not self.finished and self.membership.is_member(node):
            self._core.ends.expect_loss(when.attended_s)

    def _inquire(self, when: Moment, out: Outbox) -> None:
        """Ask about members that are silent, or gone and waited for."""
        now_s, membership = when.attended_s, self.membership
        if self._core.generations.state is generations.State.OVER or not self._core.inquiries.due(now_s):
            return
        silent = self._core.presence.overdue(now_s, lambda _: SILENT_S, least_s=SILENT_S)
        nodes = [*sorted(node for node in silent if membership.is_member(node)), *membership.missed(now_s)]
        addresses = {node: address for node in nodes if (address := self.snapshots.address(node)) is not None}
        self._core.inquiries.ask(nodes, addresses, now_s, out)

    def inquired(self, found: Sequence[Evidence], now: float, out: Outbox) -> None:
        """`InquireAbout` is done."""
        when = self._attendance.note(now)
        self._core.inquiries.answered(when.attended_s)
        for each in found:
            if self.finished:
                return
            if each.departed:
                self._depart(each.node, when, out)
                continue
            joined = self.membership.nodes[each.node].joined
            silent_s = self._core.presence.silent_s(each.node, when.attended_s) if joined else math.inf
            if (why := proof(each, silent_s)) is None:
                continue
            if joined:
                self._lost(each.node, f"silent for {silent_s:.0f} s, and {why}", when, out)
            self.membership.given_up(each.node, when.attended_s)
        self._gather(when, out)
        self._give_up_if_hopeless(when, out)

    def _lost(self, node: int, detail: str, when: Moment, out: Outbox) -> None:
        if self.finished:
            return
        before, silent_s = self.membership.nodes[node], self._core.presence.silent_s(node, when.attended_s)
        member = self.membership.is_member(node)
        self.membership.lost(node, detail, when.attended_s)
        self._core.presence.left(node)
        self._core.generations.left(node)
        if before.joined:
            self.links.forget(node)
            if member:
                self.snapshots.hold()
            self.snapshots.lost(node, out)
            if self._core.shutdown.saving is not None:
                self._core.shutdown.lost(node)
            elif member or not self.membership.is_left(node):
                what = f"the agent of node {node} on {before.host} is gone: {detail}"
                fault = self._response.node_lost(node, f"node {node}", what, detail, silent_s)
                if member:
                    self._response.on_fault(fault, when, out)
                    return
                self._response.on_fault_beside(fault, when, out)
        elif not before.host and self.membership.nodes[node].failures == LAUNCH_ATTEMPTS and self._core.shutdown.saving is None:
            what = f"the agent of node {node} does not start: {detail}"
            fault = replace(self._response.node_lost(node, f"node {node}", what, detail, 0.0), ranks=())  # none has run there
            self._response.on_fault_beside(fault, when, out)
        self._core.generations.launch(when, out)
        self._gather(when, out)

    def _gather(self, when: Moment, out: Outbox) -> None:
        if not self.finished:
            self._core.generations.gather(when, out)

    def _give_up_if_hopeless(self, when: Moment, out: Outbox) -> None:
        why = self._core.generations.hopeless(when)
        if why is not None and not self.finished:
            self._core.shutdown.conclude(Exit.UNUSABLE, why, when, out)


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
