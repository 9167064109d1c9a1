"""What is done about a fault: the situation is put together, the policy decides, and the action is carried out."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from resilient.config.timeouts import SILENCE_REPORT_S
from resilient.control.attendance import Moment
from resilient.control.core import Core
from resilient.control.generations import State
from resilient.control.inspection import Case
from resilient.control.judgement import culprit, waiting_and_others
from resilient.control.liveness import NO_STEP
from resilient.exits import Exit
from resilient.outbox import Outbox, WriteText
from resilient.recovery.faults import INCIDENTS, TOGETHER_S, Fault, computed, left_early, listed
from resilient.recovery.policy import Action, Situation, decide
from resilient.recovery.without_spare import RESTART_S, Decision, Figures
from resilient.recovery.without_spare import decide as decide_without_spare

LINK_MEMORY_S = 15.0  # a stall that began so soon after a link came back may be its doing
INSPECT_AGAIN_S = 5.0  # at ranks that wait for a link
UNHEARD_S = 2 * SILENCE_REPORT_S  # without a word of an agent: the way to it is broken, or it is gone
TEXTS = 64  # ranks of which an incident keeps the stacks


class Response:
    """Has no state of its own: it brings together those who have."""

    def __init__(self, core: Core) -> None:
        self._core = core

    # -- faults --------------------------------------------------------------------------------------------------------

    def on_fault(self, fault: Fault, when: Moment, out: Outbox, outage: str | None = None) -> None:
        """A fault of ranks. Args: outage: what a link of the group does, or did a moment ago."""
        files = fault.files if self._core.generations.trained else None  # before that, nobody has ever found them
        generation = self._core.generations.generation
        fault = replace(fault, attempt=self._core.generations.attempt(when), files=files, generation=generation)
        action = decide(self._situation(fault, when, outage))
        if action.name not in ("wait", "report"):  # else rank 0 may still say it
            self._core.generations.announce(None, None, when, out)
        down_since_t = self._down_since_t(fault, when)
        self._core.incidents.respond(fault, action, down_since_t, when.now, generation, out)
        self._act(action, fault, when, out)

    def _down_since_t(self, fault: Fault, when: Moment) -> float:
        """When the ranks ceased to get on, unix seconds: when it happened, or with the last step that they finished after it."""
        run = self._core.generations.run
        last_t = min(run.beat_t, when.now) if run is not None and run.step != NO_STEP else 0.0
        return max(when.now - fault.detect_s, last_t)

    def on_fault_beside(self, fault: Fault, when: Moment, out: Outbox) -> None:
        """A fault that concerns no rank: nothing that runs is ended for it."""
        action = decide(self._situation(fault, when, None))
        self._core.incidents.report(fault, action, when.now, self._core.generations.generation, out)

    def node_lost(self, node: int, cause: str, detail: str, evidence: str, detect_s: float) -> Fault:
        """The fault of a node that is gone, or is not fit."""
        run = self._core.generations.run
        return Fault(
            fault_id=self._core.incidents.next_id(self._core.generations.generation),
            kind="node_lost",
            cause=cause,
            ranks=tuple(self._core.membership.assignment.ranks(node)),
            nodes=(node,),
            step=computed(run.step, run.resumed_step) if run is not None else None,
            detail=detail,
            evidence=evidence,
            detect_s=detect_s,
        )

    def blame(self, when: Moment, out: Outbox) -> None:
        """Workers have failed, and whose fault it is can be said."""
        run = self._core.generations.run
        fault_id = self._core.incidents.next_id(self._core.generations.generation)
        restarted_t = run.started_t if run is not None and self._core.incidents.faults else None
        fault = self._core.ends.fault(fault_id, run.resumed_step if run is not None else None, when.now, restarted_t)
        self._core.ends.over()
        self.on_fault(fault, when, out)

    def judge(self, case: Case, when: Moment, out: Outbox) -> None:
        """All that can be known of a suspicion is known."""
        still = self._core.watchdog.still(case.suspicion)
        asked_for_s = when.attended_s - case.asked_s  # an inspection takes its time
        suspicion = replace(case.suspicion, silent_s=case.suspicion.silent_s + asked_for_s)
        stopped = any(each.state == "T" for each in case.found.values())
        if self._core.generations.state is not State.RUNNING or self._core.ends.settling or not (still or stopped):
            return
        membership = self._core.membership
        asked = [rank for node in case.nodes for rank in membership.assignment.ranks(node)]
        fault_id = self._core.incidents.next_id(self._core.generations.generation)
        watchdog = self._core.watchdog
        waits, others = waiting_and_others(case.found)
        watchdog.found_waiting(waits)
        watchdog.found_elsewhere(others, when.attended_s)
        fault = culprit(
            fault_id, suspicion, case.found, asked, watchdog.alive, membership.assignment.node_rank_of, watchdog.ceiling_s
        )
        if fault is None:
            watchdog.excuse(suspicion)
            return
        if fault.kind == "hang" and (further_s := watchdog.further_s(fault.ranks, when.attended_s)):
            watchdog.excuse(suspicion, further_s)
            return
        fault = replace(fault, nodes=tuple(membership.members[node_rank] for node_rank in fault.nodes))
        if fault.kind == "collective_timeout" and (left := self._core.ends.left(when.now - asked_for_s - TOGETHER_S)):
            run = self._core.generations.run
            fault = left_early(fault, left, run.resumed_step if run is not None else None)
        outage = next(iter(self._core.links.outages(when.now, within_s=LINK_MEMORY_S + suspicion.silent_s)), None)
        why = None
        if outage is not None:
            why = str(outage)
            fault = replace(fault, detail=f"{fault.detail}; {outage}")
        if unheard := self._unheard(fault, when):
            fault, why = replace(fault, kind="link_down", detail=f"{fault.detail}; {unheard}"), unheard
        self._leave_texts(fault, case, out)
        self.on_fault(fault, when, out, why)

    def _unheard(self, fault: Fault, when: Moment) -> str | None:
        """Whether nothing at all is heard of the culprit's node, so that nobody can say whether its rank hangs."""
        longest_s = min((self._core.presence.silent_s(node, when.attended_s) for node in fault.nodes), default=0.0)
        if fault.cause != "silent" or longest_s < UNHEARD_S:
            return None
        return f"nothing has been heard of node {listed(fault.nodes)} for {longest_s:.1f} s"

    def _leave_texts(self, fault: Fault, case: Case, out: Outbox) -> None:
        """What the ranks were doing, those who are to blame before the others."""
        guilty = set(fault.ranks)
        ranks = sorted(case.found, key=lambda rank: (rank not in guilty, rank))[:TEXTS]
        for rank in sorted(ranks):
            found = case.found[rank]
            about = f"rank {rank}: state {found.state or 'none'}, {found.cpu:.0%} of a core\n\n"
            out.append(WriteText(f"{INCIDENTS}/{fault.fault_id}/rank{rank}.txt", about + found.stacks))

    def _situation(self, fault: Fault, when: Moment, outage: str | None) -> Situation:
        return Situation(
            fault=fault,
            earlier=self._core.incidents.faults,
            budget=self._core.job.budget,
            draining=self._core.shutdown.drain is not None,
            now=when.now,
            outage=outage,
            link_grace_s=self._core.job.link_grace_s,
            stand_in=self._stand_in(fault.nodes, when),
            roll_backs=self._core.roll_backs.done,
            checkpoints=self._core.snapshots.checkpoints,
            beginning=self._core.snapshots.beginning,
            replace_stragglers=self._core.job.replace_stragglers,
            dispensable=fault.kind == "node_lost" and self._core.membership.can_leave(fault.nodes),
            left=self._core.membership.left(),
        )

    def _stand_in(self, nodes: Collection[int], when: Moment) -> str:
        """What becomes of the place of a node that is gone, in words."""
        spare, decision = self._core.membership.spare(), self._without_spare(when)
        if spare is not None:
            return f"spare node {spare} takes over"
        if nodes and all(self._core.evacuation.leaves(node) for node in nodes):
            return "it was to be left, and the others go on without it"
        if decision is None:
            slow = self._core.membership.spare(slow=True)
            return f"node {slow}, which was slow, takes over" if slow is not None else "its agent is started anew"
        if decision.choice == "shrink":
            return f"its agent is started anew, and if it is not back in {self._core.job.rejoin_s:g} s, {decision.reason}"
        return decision.reason

    def _without_spare(self, when: Moment) -> Decision | None:
        """What to do about a node that is gone; None where as many as before can go on all the same, or fewer cannot anyway."""
        job, membership = self._core.job, self._core.membership
        fewer = membership.fewer()
        if membership.spare() is not None or fewer in (0, max(job.layouts)):
            return None
        returns_s = [*job.measured.returns_s, *membership.returns_s]
        end_t = self._core.shutdown.end_t
        figures = Figures(
            nodes=membership.wanted,
            fewer=-(-fewer // job.procs_per_node),
            rate=job.rate(fewer),
            returns_s=[each for each in returns_s if each > job.rejoin_s],  # for so long it is waited for in any case
            restart_s=median(job.measured.restarts_s) if job.measured.restarts_s else RESTART_S,
            left_s=max(0.0, end_t - when.now) if end_t is not None else None,
            limit_s=job.end_t - job.start_t if job.end_t is not None and job.start_t is not None else None,
            queues_s=job.measured.queues_s,
        )
        return decide_without_spare(job.without_spare, figures)

    def _wait_or_end(self, nodes: Sequence[int], when: Moment, out: Outbox) -> None:
        """A node is gone, and no spare is there: it may be better to wait for it, or to leave the rest to the next job.

        One that was left is not waited for: it does not come back.
        """
        nodes = [node for node in nodes if not self._core.membership.is_left(node)]
        decision = self._without_spare(when) if nodes else None
        if decision is None or decision.choice == "shrink":
            return
        if decision.choice == "next_job":
            self._core.shutdown.conclude(Exit.STOPPED, f"node {listed(nodes)} is gone: {decision.reason}", when, out)
            return
        for node in nodes:
            self._core.membership.hold_for(node, when.attended_s + decision.patience_s)

    # -- actions -------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, fault: Fault, when: Moment, out: Outbox) -> None:
        match action.name:
            case "wait":
                self._core.watchdog.found_waiting(fault.ranks)
                self._core.inspector.wait(
                    when.attended_s + max(1.0, min(INSPECT_AGAIN_S, self._core.job.link_grace_s - fault.detect_s))
                )
            case "give_up" if fault.final is not None:
                self._core.shutdown.conclude(Exit(fault.final), fault.evidence, when, out)
            case "give_up":
                self._core.roll_backs.given_up(fault, out)
                message = f"{action.reason}; rank {listed(fault.ranks)}:\n{fault.evidence.rstrip()}"
                self._core.shutdown.conclude(Exit.GAVE_UP, message, when, out)
            case "finish_drain":
                if action.roll_back is not None:
                    self._core.roll_backs.roll_back(action.roll_back, fault, out)
                else:
                    self._core.roll_backs.given_up(fault, out)
                self._core.shutdown.finish_drain(f"{fault.detail} while stopping: {action.reason}", when, out)
            case "replace_node" | "restart_workers" | "roll_back":
                if action.roll_back is not None:
                    self._core.roll_backs.roll_back(action.roll_back, fault, out)
                if fault.kind in ("hang", "collective_timeout") and fault.ranks:
                    self._core.watchdog.gave_up(fault.ranks[0])
                if fault.kind == "straggler":
                    self._give_up_on(fault.nodes, when, out)
                for node in fault.nodes if action.leave else ():
                    self._core.evacuation.is_ill(node, action.leave)
                self._core.generations.hold_back(when.attended_s + action.delay_s)
                self._leave_out(fault, when, out)
                self._regather(when, out)
                if fault.kind == "node_lost":
                    self._wait_or_end(fault.nodes, when, out)

    def leave_out(self, node: int, devices: Collection[int], why: str, when: Moment, out: Outbox) -> bool:
        """Whether a node can go on without these devices, which do not work: from the next generation on it does."""
        membership = self._core.membership
        if not membership.leave_out(node, devices):
            return False
        reason = f"device {listed(sorted(devices))} of node {node} is left out: {why}"
        self._core.incidents.follow_up("leave_out", reason, when.now, self._core.generations.generation, out)
        return True

    def _leave_out(self, fault: Fault, when: Moment, out: Outbox) -> None:
        """The device of a rank has failed: where its node may go on without it, it need not take the others along."""
        assignment = self._core.membership.assignment
        for rank in fault.ranks if fault.device else ():
            self.leave_out(assignment.node_of(rank), {assignment.device_of(rank)}, fault.detail, when, out)

    def grow(self, when: Moment, out: Outbox) -> None:
        """Nodes are taken in that have returned."""
        self._core.generations.report_growth(when, out)
        self._regather(when, out)

    def evacuate(self, when: Moment, out: Outbox) -> None:
        """The ranks have stopped, or should have, so that nodes can be left."""
        self._regather(when, out)

    def _regather(self, when: Moment, out: Outbox) -> None:
        """End the present generation for the next one."""
        self._core.evacuation.leave(when, out)
        self._core.inspector.drop()
        self._core.ends.over()
        self._core.generations.regather(when, out)

    def _give_up_on(self, nodes: Sequence[int], when: Moment, out: Outbox) -> None:
        """Nodes that are slow: a spare takes their place if there is one, else their agents are to be others."""
        for node in nodes:
            if self._core.membership.spare() is not None:
                self._core.membership.shun(node)
                continue
            self._core.links.forget(node)
            self._core.presence.left(node)
            self._core.snapshots.hold()
            self._core.membership.lost(node, "it was too slow", when.attended_s)
            self._core.snapshots.lost(node, out)
