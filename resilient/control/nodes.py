"""What becomes of nodes: those that are fit and ready, those that are silent or lost, and those that have left the job."""

import math
from collections.abc import Sequence
from dataclasses import replace

from resilient.control import fitness
from resilient.control.attendance import Moment
from resilient.control.core import Core
from resilient.control.evidence import DEPARTED, SILENT_S, Evidence, proof
from resilient.control.generations import State
from resilient.control.membership import LAUNCH_ATTEMPTS, STUCK_S
from resilient.control.response import Response
from resilient.exits import Exit
from resilient.outbox import Outbox
from resilient.protocol.messages import Health, Hello, LinksChanged, Ready
from resilient.recovery.policy import ILL, UNFIT


class Nodes:
    """Has no state of its own: it tells those who have, and has faults answered."""

    def __init__(self, core: Core, response: Response) -> None:
        self._core = core
        self._response = response

    @property
    def _generation(self) -> int:
        return self._core.generations.generation

    # -- what their agents tell ----------------------------------------------------------------------------------------

    def on_hello(self, node: int, message: Hello, when: Moment) -> None:
        skew_s = message.t - when.now
        if skew_s < 0:  # it may be late, and not its clock
            skew_s = min(0.0, skew_s + when.late_s)
        place = self._core.job.places.get(message.host.partition(".")[0], message.place)
        self._core.membership.hello(node, message.host, message.addr, when.attended_s, skew_s=skew_s, place=place)
        self._core.evacuation.joined(node)
        self._core.presence.joined(node, when.attended_s)

    def on_ready(self, node: int, message: Ready, when: Moment, out: Outbox) -> None:
        """An agent waits for the next generation. One that counts as lost is heard too late: another one is about to be started."""
        if not self._core.membership.nodes[node].joined and self._core.shutdown.saving is None:
            return
        self._core.membership.is_ready(node, message.store_port)
        self._core.snapshots.inventory(node, message.inventory)
        if self._core.shutdown.saving is not None:
            self._core.shutdown.sync(node, when, out)
            return
        self._core.generations.stand_by()
        self.gather(when, out)

    def on_health(self, node: int, message: Health, when: Moment, out: Outbox) -> None:
        """A node has been checked. One that is not fit is left out, but its agent lives, for what it holds.

        Of one that counts as lost it says nothing: its next agent has it checked anew.
        """
        known = self._core.membership.nodes[node]
        found = fitness.judge(f"node {node} ({known.host})", message, known.skew_s)
        if found.event is not None:
            out.event("health", {"node": node, **found.event}, self._generation, when.now, known.host)
        if self._core.shutdown.saving is not None or not known.joined:  # no ranks are wanted any more, but what it holds is
            return
        if found.dead and not self._core.membership.is_left(node):
            why = found.unfit or found.ill or ""
            if found.dead <= known.dead or self._response.leave_out(node, found.dead, why, when, out):
                self._core.generations.left(node)
                self.gather(when, out)
                return
        if found.ill is not None and not self._core.evacuation.concerns(node):
            self._response.on_fault_beside(self._response.node_lost(node, ILL, found.ill, found.ill, 0.0), when, out)
            self._core.evacuation.is_ill(node, found.ill)
        if found.unfit is None:
            return
        fault = self._response.node_lost(node, UNFIT, found.unfit, found.unfit, 0.0)
        self._core.membership.refused(node, found.unfit)
        if self._core.membership.is_left(node):  # that one takes no part in any case
            return
        self._core.generations.left(node)
        self._response.on_fault_beside(fault, when, out)
        self.gather(when, out)
        self.give_up_if_hopeless(when, out)

    def on_links_changed(self, node: int, message: LinksChanged, when: Moment, out: Outbox) -> None:
        for change in message.changes:
            self._core.links.changed(node, change, when.now)
            fields = {
                "node": node,
                "interface": change.interface,
                "state": change.state,
                "down_s": round(change.down_s, 3) if change.down_s is not None else None,
                "detail": change.detail,
                "counters": dict(change.counters),
            }
            out.event("link", fields, self._generation, message.t, self._core.membership.nodes[node].host)

    # -- those that are gone -------------------------------------------------------------------------------------------

    def overdue(self, when: Moment, out: Outbox) -> None:
        """Those that have been silent for too long, or were not ready in time, are lost."""
        membership, presence, job = self._core.membership, self._core.presence, self._core.job
        spare = membership.spare()
        # A spare that is silent, too, stands in for nobody: it is the way from here to the nodes that does not work.
        stands_in = spare is not None and presence.silent_s(spare, when.attended_s) < SILENT_S

        def limit_s(node: int) -> float:
            return job.silence_with_spare_s if stands_in and membership.is_member(node) else job.silence_s

        for node in presence.overdue(when.attended_s, limit_s, least_s=min(job.silence_s, job.silence_with_spare_s)):
            self.lost(node, f"silent for {presence.silent_s(node, when.attended_s):.0f} s", when, out)
        for node in membership.stuck(when.attended_s):
            what = "the entry point is not imported, or the node not checked"
            self.lost(node, f"its agent answers, but was not ready within {STUCK_S:.0f} s: {what}", when, out)

    def inquire(self, when: Moment, out: Outbox) -> None:
        """Ask about members that are silent, or gone and waited for."""
        now_s, membership = when.attended_s, self._core.membership
        if self._core.generations.state is State.OVER or not self._core.inquiries.due(now_s):
            return
        silent = self._core.presence.overdue(now_s, lambda _: SILENT_S, least_s=SILENT_S)
        nodes = [*sorted(node for node in silent if membership.is_member(node)), *membership.missed(now_s)]
        addresses = {node: address for node in nodes if (address := self._core.snapshots.address(node)) is not None}
        self._core.inquiries.ask(nodes, addresses, now_s, out)

    def inquired(self, found: Sequence[Evidence], when: Moment, out: Outbox) -> None:
        """`InquireAbout` is done."""
        self._core.inquiries.answered(when.attended_s)
        for each in found:
            if self._core.shutdown.finished:
                return
            if each.departed:
                self._depart(each.node, when, out)
                continue
            joined = self._core.membership.nodes[each.node].joined
            silent_s = self._core.presence.silent_s(each.node, when.attended_s) if joined else math.inf
            if (why := proof(each, silent_s)) is None:
                continue
            if joined:
                self.lost(each.node, f"silent for {silent_s:.0f} s, and {why}", when, out)
            self._core.membership.given_up(each.node, when.attended_s)
        self.gather(when, out)
        self.give_up_if_hopeless(when, out)

    def departed(self, nodes: Sequence[int], when: Moment, out: Outbox) -> None:
        """The scheduler has taken these nodes out of the job: the run goes on without them."""
        for node in nodes:
            self._depart(node, when, out)
        self.gather(when, out)
        self.give_up_if_hopeless(when, out)

    def _depart(self, node: int, when: Moment, out: Outbox) -> None:
        if self._core.shutdown.finished or self._core.membership.has_departed(node):
            return
        if self._core.membership.nodes[node].joined:
            self.lost(node, DEPARTED, when, out)
        self._core.membership.depart(node, DEPARTED, when.attended_s)
        reason = f"node {node} has left the job: it is not waited for, and no agent is started there any more"
        self._core.incidents.follow_up("departed", reason, when.now, self._generation, out)

    def lost(self, node: int, detail: str, when: Moment, out: Outbox) -> None:
        """A node is gone: what follows from it for the generation, for what it held, and for the run."""
        if self._core.shutdown.finished:
            return
        membership = self._core.membership
        before, silent_s = membership.nodes[node], self._core.presence.silent_s(node, when.attended_s)
        member = membership.is_member(node)
        membership.lost(node, detail, when.attended_s)
        self._core.presence.left(node)
        self._core.generations.left(node)
        if before.joined:
            self._core.links.forget(node)
            if member:
                self._core.snapshots.hold()
            self._core.snapshots.lost(node, out)
            if self._core.shutdown.saving is not None:
                self._core.shutdown.lost(node)
            elif membership.nodes[node].failures <= LAUNCH_ATTEMPTS and (member or not membership.is_left(node)):
                what = f"the agent of node {node} on {before.host} is gone: {detail}"
                fault = self._response.node_lost(node, f"node {node}", what, detail, silent_s)
                if member:
                    self._response.on_fault(fault, when, out)
                    return
                self._response.on_fault_beside(fault, when, out)
        elif not before.host and membership.nodes[node].failures == LAUNCH_ATTEMPTS and self._core.shutdown.saving is None:
            what = f"the agent of node {node} does not start: {detail}"
            fault = replace(self._response.node_lost(node, f"node {node}", what, detail, 0.0), ranks=())  # none has run there
            self._response.on_fault_beside(fault, when, out)
        self._core.generations.launch(when, out)
        self.gather(when, out)

    def gather(self, when: Moment, out: Outbox) -> None:
        """Start the next generation, if one is wanted and its nodes are there."""
        if not self._core.shutdown.finished:
            self._core.generations.gather(when, out)

    def give_up_if_hopeless(self, when: Moment, out: Outbox) -> None:
        """End the run where it can never go on, also with nodes that were left."""
        if not self._core.shutdown.finished and self._core.evacuation.keep(when, out):
            self.gather(when, out)
        why = self._core.generations.hopeless(when)
        if why is not None and not self._core.shutdown.finished:
            self._core.shutdown.conclude(Exit.UNUSABLE, why, when, out)
