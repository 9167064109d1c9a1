"""Evacuation: a node that is about to go is left at a step boundary, while all that it holds can still be read.

All ranks stop at one boundary (`resilient.control.hold`), with a snapshot of it; the next generation begins without the node, from
that very step. Once it goes on, and the newest snapshot is durable or whole without the node, the node is released: its agent ends,
with what it holds in memory. Where the others cannot go on without it, that is told once, and the node is left as soon as they can;
one that is not released yet takes part again. A node that goes on without a device of its own stops its ranks in the same way.
"""

import math
from collections.abc import Collection, Mapping

from resilient.control.attendance import Moment
from resilient.control.generations import Generations, State
from resilient.control.incidents import Incidents
from resilient.control.job import JobSpec
from resilient.control.liveness import NO_STEP
from resilient.control.membership import Membership
from resilient.control.shutdown import Shutdown
from resilient.outbox import Outbox
from resilient.protocol.messages import Shutdown as ShutdownMessage
from resilient.recovery.faults import listed
from resilient.snapshots import Snapshots

REASON = "evacuation"
UNSEEN_S = 60.0  # a script that has not told a step by then tells none
KEPT_S = 300.0  # a node that was left and is kept for longer is told


class Evacuation:
    """Invariants: `_waiting` are those of `_wanted` and `_ill` of which it was told that there is nowhere to go; `_holding_s` is
    when the generation that runs was asked to stop for them, attended seconds; `_releasing` are nodes that were left and whose
    agents, where they have any, were not told to end, and `_ending` those that were; `_kept_s` is of some of the former.
    """

    def __init__(
        self,
        job: JobSpec,
        membership: Membership,
        snapshots: Snapshots,
        incidents: Incidents,
        generations: Generations,
        shutdown: Shutdown,
    ) -> None:
        self._job, self._membership, self._snapshots = job, membership, snapshots
        self._incidents, self._generations, self._shutdown = incidents, generations, shutdown
        self._wanted: Mapping[int, str] = {}  # and why, as of _ill
        self._ill: dict[int, str] = {}
        self._waiting: set[int] = set()
        self._releasing: set[int] = set()
        self._ending: set[int] = set()
        self._kept_s: dict[int, float] = {}  # since when all go on without them, attended seconds; endless once that was told
        self._holding_s: float | None = None

    def want(self, nodes: Mapping[int, str], resumed: Collection[int], when: Moment, out: Outbox) -> None:
        """These nodes, and no others but those that are ill, are to be left, or stay so; one that is none of them any more is taken
        back.

        Args:
            nodes: and why.
            resumed: may be used again, ill or not.
        """
        before = self._causes()
        self._wanted = dict(nodes)
        for node in resumed:
            self._ill.pop(node, None)
        for node in sorted(before.keys() - self._causes().keys()):
            self._waiting.discard(node)
            if not self._membership.nodes[node].joined:
                self._releasing.discard(node)
            if self._membership.is_left(node) and not self._membership.has_departed(node):
                self._membership.take_back(node, when.attended_s)
                self._follow_up("resume", f"node {node} is to be taken in again", when, out)

    def is_ill(self, node: int, why: str) -> None:
        """A node is to be left until somebody says that it may be used again: it works as yet, or is lost again and again."""
        self._ill.setdefault(node, why)

    def joined(self, node: int) -> None:
        """A node has an agent: one that was left is released as soon as all go on, and nothing that it holds is needed."""
        self._ending.discard(node)
        if self._membership.is_left(node):
            self._releasing.add(node)

    def concerns(self, node: int) -> bool:
        """Whether a node is to be left."""
        return node in self._causes()

    def leaves(self, node: int) -> bool:
        """Whether a node is left already, or will be as soon as this generation is over."""
        return self._membership.is_left(node) or node in self._able()

    def _causes(self) -> dict[int, str]:
        """The nodes that are to be left, and why."""
        return {**self._ill, **self._wanted}

    def overdue(self, when: Moment, out: Outbox) -> bool:
        """Go on with what is wanted; whether the ranks have not stopped in time, so that they are to be ended where they are."""
        if self._shutdown.drain is not None or self._generations.state is not State.RUNNING:
            return False
        if self._holding_s is not None:
            return when.attended_s - self._holding_s > self._job.drain_s
        if not self._going_on(when):
            return False
        self._release(when, out)
        leaving = self._able()
        for node in [node for node in leaving if not self._membership.is_member(node)]:
            leaving.remove(node)
            was = "stood by" if self._membership.nodes[node].joined else "is gone"
            self._leave(node, "release", f"node {node}, which {was}, is left: {self._causes()[node]}", when, out)
        if stuck := sorted(self._left_to_do() - set(leaving) - self._waiting):
            self._waiting.update(stuck)
            whys = "; ".join(sorted({self._causes()[node] for node in stuck}))
            what = f"node {listed(stuck)} is to be left ({whys})"
            reason = f"{what}, but the others cannot go on without it: it is left once a node stands by"
            self._follow_up("evacuation_waits", reason, when, out)
        if (leaving or self._membership.computes_on_dead()) and self._generations.hold is None:
            self._holding_s = when.attended_s
            self._generations.hold_ranks(REASON, out)
        return False

    def _going_on(self, when: Moment) -> bool:
        """Whether the generation has come to where it goes on from, or is a script's of which no step is seen."""
        run = self._generations.run
        if run is None:
            return False
        unseen = self._job.script and not run.announced and run.step == NO_STEP and when.now - run.started_t > UNSEEN_S
        return run.resumed_step is not None or unseen

    def leave(self, when: Moment, out: Outbox) -> None:
        """The generation is over: the next one begins without the nodes that are to be left, if it can."""
        self._holding_s = None
        for node in self._able():
            self._leave(node, "evacuate", f"node {node} is left: {self._causes()[node]}; all go on without it", when, out)

    def _leave(self, node: int, name: str, reason: str, when: Moment, out: Outbox) -> None:
        self._membership.leave(node, "it is about to go", when.attended_s)
        self._waiting.discard(node)
        self._releasing.add(node)
        self._follow_up(name, reason, when, out)

    def _release(self, when: Moment, out: Outbox) -> None:
        """All go on: nodes that were left end, but for those without which the newest snapshot would be lost."""
        if not self._releasing:
            return
        nodes = self._membership.nodes
        self._releasing = {node for node in self._releasing if nodes[node].joined}
        self._ending = {node for node in self._ending if nodes[node].joined}
        told = [
            node for node in sorted(self._releasing) if nodes[node].ready_port is not None or when.attended_s >= nodes[node].until_s
        ]
        for node in self._snapshots.dispensable(told, sorted(self._ending)):
            clear = (self._snapshots.plan.memory.name,)
            out.send(node, ShutdownMessage(generation=self._generations.generation, clear=clear))
            self._releasing.discard(node)
            self._ending.add(node)
        self._kept_s = {node: self._kept_s.get(node, when.attended_s) for node in self._releasing.intersection(told)}
        if late := sorted(node for node, kept_s in self._kept_s.items() if when.attended_s - kept_s > KEPT_S):
            self._kept_s |= dict.fromkeys(late, math.inf)
            newest = self._snapshots.newest
            what = f"node {listed(late)} was left, and its agent does not end yet"
            why = f"what it holds of step {newest.step if newest is not None else 0} is not durable and nowhere else"
            self._follow_up("evacuation_waits", f"{what}: {why}", when, out)

    def keep(self, when: Moment, out: Outbox) -> bool:
        """Where those that are there make no generation, nodes that were left and not released take part again; whether some do."""
        if not self._releasing or self._generations.state is not State.GATHERING or self._membership.fewer():
            return False
        back = self._membership.put_back(sorted(self._releasing, key=lambda node: (node in self._ill, node)))
        self._releasing.difference_update(back)
        causes = self._causes()
        if told := sorted(node for node in back if node in causes):
            self._waiting.update(told)
            whys = "; ".join(sorted({causes[node] for node in told}))
            reason = (
                f"node {listed(told)} was left ({whys}), but the others cannot go on without it: it takes part again until they can"
            )
            self._follow_up("evacuation_waits", reason, when, out)
        return bool(back)

    def _left_to_do(self) -> set[int]:
        return {node for node in self._causes() if not self._membership.is_left(node)}

    def _able(self) -> list[int]:
        """Those of them without which the others can go on, one beside the other."""
        to_do = sorted(self._left_to_do())
        return self._membership.dispensable(to_do) if to_do else []

    def _follow_up(self, name: str, reason: str, when: Moment, out: Outbox) -> None:
        self._incidents.follow_up(name, reason, when.now, self._generations.generation, out)
