"""Membership: which nodes of the allocation take part in the next generation.

A node is a place of the allocation with an agent on it, or none. The first ones compute, the others are spares: their agents stand
by with torch imported. A spare takes the node rank of a node that is gone, so that all other ranks stay where their snapshots are.
Where there is none, the run waits a moment for the node to return, then goes on with as many as the layout allows, and takes in
what has returned later on. The ranks of a node follow each other, and tensor-parallel groups lie inside a node; nodes follow each
other in the order of the fabric.

Owns who is there and who is a member; when generations end and start is `resilient.control.generations`' affair. All times are
attended seconds (`resilient.control.attendance`). News of a node costs the same however many there are; all nodes are visited
only when nobody is waited for any more.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from resilient.control.assignment import RankAssignment
from resilient.control.shares import Rules, shares, whole
from resilient.placement import fabric
from resilient.recovery.without_spare import REMEMBERED

LAUNCH_ATTEMPTS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
JOIN_S = 600.0  # for an agent's first start; a thousand nodes import torch from one file system
BACK_S = 120.0  # for an agent that is started anew, where nothing goes on without it
READY_S = 60.0  # from an agent's hello until it should have opened its store; fewer nodes go on without it then
STUCK_S = 600.0  # and until it counts as lost: it may import from a file system that a thousand nodes share


@dataclass
class Node:
    """An agent, as far as it is known.

    Attributes:
        works: it has been ready since it was started.
        ready_port: of the store that it has opened for the next generation; None while it has not.
        skew_s: its clock is so far ahead of the driver's.
        failures: attempts to start it that came to nothing, in a row; an agent that has never been ready is one.
        until_s: for so long the next generation waits for it.
        back_s: and for so long where there would be none without it.
        gone: it was here, or could not be started; a spare may take its place.
        unfit: it takes no part, but what it holds is read and saved as any other node's.
        failed: it is unfit for what it is, and not only because it was left.
        slow: it takes part only where no other can.
        why: it is gone, or unfit.
        place: in the fabric.
        dead: devices that are left out, by the local rank that each would have.
    """

    joined: bool = False
    works: bool = False
    ready_port: int | None = None
    host: str = ""
    addr: str = ""
    skew_s: float = 0.0
    failures: int = 0
    until_s: float = 0.0
    back_s: float = 0.0
    gone: bool = False
    unfit: bool = False
    failed: bool = False
    slow: bool = False
    why: str = ""
    place: str = ""
    dead: frozenset[int] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether it waits for the next generation, and may take part."""
        return self.ready_port is not None and not self.unfit


class Membership:
    """The nodes, and which of them are members: those of the present generation, or of the last one.

    Attributes:
        assignment: which ranks are on which member.

    Args:
        rules: how many ranks a generation and its nodes may have; the most are what the config asks for.
        spares: nodes beside those.
        rejoin_s: for so long a node that is gone is waited for, where no spare takes its place.
        stage_nodes: nodes that shard the state of a pipeline stage among them, which follow each other.

    Invariants, of sets that spare a pass over all nodes: `_absent` are those that have not joined, `_unfit` those that are unfit,
    `_awaited` the members that are neither ready nor gone, `_standing_by` those that are ready and no members, `_held_for`
    some of those in `_absent`, `_wounded` those with devices that are left out. `_stuck_s` has those that have come and were not
    ready yet, the first that came first.
    """

    def __init__(self, rules: Rules, spares: int, rejoin_s: float, stage_nodes: int = 1) -> None:
        self._rules = rules
        self._rejoin_s = rejoin_s
        self.wanted = rules.nodes
        self.nodes = [Node() for _ in range(self.wanted + spares)]
        self._stage_nodes = stage_nodes
        self.assignment = RankAssignment(range(self.wanted), (rules.procs,) * self.wanted)
        self._wounded: set[int] = set()
        self._started = False
        self._absent = set(range(len(self.nodes)))
        self._unfit: set[int] = set()
        self._awaited = set(range(self.wanted))
        self._standing_by: set[int] = set()
        self._launch_s: dict[int, float] = {}  # when an agent is to be started, of those that are
        self._patient_s = 0.0  # until then, others than the members are waited for as well
        self._lost_s: dict[int, float] = {}  # when nodes that are gone were lost
        self.returns_s: deque[float] = deque(maxlen=REMEMBERED)  # what nodes have taken to come back
        self._held_for: dict[int, float] = {}  # without these no generation begins before then
        self._stuck_s: dict[int, float] = {}  # when nodes that have come count as lost, for they were never ready
        self._left: dict[int, str] = {}  # on request, and why; no agent is started there
        self._departed: set[int] = set()  # of those, the ones that are not of the job any more

    def begin(self, now_s: float) -> None:
        """The job begins: all are to be started."""
        for index, node in enumerate(self.nodes):
            node.until_s, node.back_s = now_s + JOIN_S, now_s + JOIN_S
            self._launch_s[index] = now_s
        self._patient_s = now_s + JOIN_S

    # -- news ----------------------------------------------------------------------------------------------------------

    def launches(self, now_s: float) -> list[int]:
        """The nodes whose agents are to be started now; they count as started."""
        due = sorted(index for index, launch_s in self._launch_s.items() if launch_s <= now_s)
        for index in due:
            del self._launch_s[index]
        return due

    def hello(self, index: int, host: str, addr: str, now_s: float, *, skew_s: float = 0.0, place: str = "") -> None:
        """An agent has connected. That of a node that was left takes no part: it was starting by then, or its connection broke."""
        node = self.nodes[index]
        node.joined, node.host, node.addr, node.skew_s, node.place = True, host, addr, skew_s, place
        if node.gone and (lost_s := self._lost_s.pop(index, None)) is not None:
            self.returns_s.append(now_s - lost_s)
        node.until_s = max(node.until_s, now_s + READY_S)
        node.back_s = max(node.back_s, node.until_s)
        self._stuck_s.pop(index, None)
        self._stuck_s[index] = now_s + STUCK_S
        self._absent.discard(index)
        self._held_for.pop(index, None)
        if index in self._left:
            self._set_aside(index, self._left[index])

    def is_ready(self, index: int, store_port: int) -> None:
        """An agent waits for the next generation, its new store open at this port."""
        node = self.nodes[index]
        node.ready_port, node.failures, node.works = store_port, 0, True
        self._stuck_s.pop(index, None)
        self._awaited.discard(index)
        if node.ready and not self.is_member(index):
            self._standing_by.add(index)

    def lost(self, index: int, why: str, now_s: float) -> None:
        """An agent is gone, or was never ready; it is started again, the first time at once."""
        before = self.nodes[index]
        node = self.nodes[index] = Node(host=before.host, gone=True, why=why)
        self._absent.add(index)
        self._stuck_s.pop(index, None)
        for others in (self._unfit, self._awaited, self._standing_by, self._wounded):
            others.discard(index)
        if index in self._left:
            return
        self._launch_s[index] = now_s
        if before.works:
            self._lost_s[index] = now_s
        else:
            node.failures = before.failures + 1
            self._launch_s[index] += min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (node.failures - 1))
        if node.failures >= LAUNCH_ATTEMPTS:
            node.until_s, node.back_s = now_s, now_s
        elif before.joined:
            node.until_s, node.back_s = now_s + self._rejoin_s, now_s + max(self._rejoin_s, BACK_S)
            if self.is_member(index):
                self._patient_s = now_s + self._rejoin_s
        else:
            node.until_s, node.back_s = before.until_s, before.back_s

    def stuck(self, now_s: float) -> list[int]:
        """The nodes whose agents have come and were not ready within `STUCK_S`."""
        return [index for index, _ in takewhile(lambda each: each[1] <= now_s, self._stuck_s.items())]

    def given_up(self, index: int, now_s: float) -> None:
        """It is known that a node that is gone will not be back soon: nobody waits for it where others can go on."""
        if index in self._absent:
            self.nodes[index].until_s = min(self.nodes[index].until_s, now_s)

    def hold_for(self, index: int, until_s: float) -> None:
        """A node that is gone is waited for until it is back, or another one stands in for it, however often it does not start."""
        self._held_for[index] = until_s

    def missed(self, now_s: float) -> list[int]:
        """The members that are gone and waited for."""
        absent = (index for index in self._absent if index in self.assignment)
        return sorted(index for index in absent if self.nodes[index].gone and now_s < self.nodes[index].until_s)

    def refused(self, index: int, why: str) -> None:
        """A node is not fit to take part, until its agent is started anew."""
        self._set_aside(index, why)
        self.nodes[index].failed = True

    def _set_aside(self, index: int, why: str) -> None:
        node = self.nodes[index]
        node.gone, node.unfit, node.why = True, True, why
        self._unfit.add(index)
        self._stuck_s.pop(index, None)
        self._awaited.discard(index)
        self._standing_by.discard(index)

    def leave(self, index: int, why: str, now_s: float) -> None:
        """A node takes no part any more, nor is its agent started, until it is taken back; what it holds is still read."""
        self._left[index] = why
        self._launch_s.pop(index, None)
        self._held_for.pop(index, None)
        if self.nodes[index].joined:
            self._set_aside(index, why)
            self.nodes[index].until_s = now_s + READY_S  # it has told what it holds by then
        else:
            self.nodes[index].until_s = self.nodes[index].back_s = now_s

    def depart(self, index: int, why: str, now_s: float) -> None:
        """A node without an agent is no node of the job any more: it is not waited for, nor taken back."""
        self._departed.add(index)
        self.leave(index, why, now_s)
        node = self.nodes[index]
        node.gone, node.why = True, why

    def has_departed(self, index: int) -> bool:
        """Whether a node has left the job."""
        return index in self._departed

    def take_back(self, index: int, now_s: float) -> None:
        """A node that was left takes part again, with a new agent."""
        self._left.pop(index, None)
        if not self.nodes[index].joined:
            self.nodes[index].until_s = self.nodes[index].back_s = now_s + BACK_S
            self._launch_s[index] = now_s

    def put_back(self, nodes: Iterable[int]) -> list[int]:
        """Of these nodes, which were left, the first ones take part again, as many as a generation needs: the others make none.

        Returns:
            those that do; none where all of them would not be enough.
        """
        rest = set(range(len(self.nodes))) - self._absent - self._unfit
        needed: list[int] = []
        for index in nodes:
            node = self.nodes[index]
            if not node.joined or node.failed or (node.ready_port is None and not self.is_member(index)):
                continue
            needed.append(index)
            if self._world((*rest, *needed), len(rest) + len(needed)):
                for each in needed:
                    self._put_back(each)
                return needed
        return []

    def _put_back(self, index: int) -> None:
        node = self.nodes[index]
        node.gone, node.unfit, node.why = False, False, ""
        self._left.pop(index, None)
        self._unfit.discard(index)
        if node.ready_port is None:
            self._awaited.add(index)
        elif not self.is_member(index):
            self._standing_by.add(index)

    def is_left(self, index: int) -> bool:
        """Whether a node was left and not taken back."""
        return index in self._left

    def left(self) -> frozenset[int]:
        """The nodes that were left and not taken back."""
        return frozenset(self._left)

    def can_leave(self, leaving: Collection[int]) -> bool:
        """Whether the others can go on at once without these."""
        rest = self._there().difference(leaving)
        return self._world(rest, len(rest)) > 0

    def dispensable(self, nodes: Iterable[int]) -> list[int]:
        """Of these nodes, in their order, those without which the others can go on at once, also without the ones before."""
        found, rest = [], self._there()
        for index in nodes:
            there = index in rest
            rest.discard(index)
            if self._world(rest, len(rest)):
                found.append(index)
            elif there:
                rest.add(index)
        return found

    def _there(self) -> set[int]:
        """Those that a generation could be made of at once."""
        return {*self.members, *self._standing_by}.difference(self._absent, self._unfit)

    def leave_out(self, index: int, devices: Collection[int]) -> bool:
        """Devices of a node do not work: from the next generation on it goes on without them, until its agent is started anew.

        Returns:
            whether it can: else nothing has changed.
        """
        node = self.nodes[index]
        before, node.dead = node.dead, node.dead.union(devices)
        self._wounded.add(index)
        those = (each for each in (*self.members, *self._standing_by) if not self.nodes[each].unfit)
        if self._usable(index) and node.joined and self._world(those):
            return True
        node.dead = before
        if not before:
            self._wounded.discard(index)
        return False

    def computes_on_dead(self) -> list[int]:
        """The members whose ranks compute on devices that are to be left out."""
        return sorted(index for index in self._wounded if not self.nodes[index].dead.isdisjoint(self.assignment.devices(index)))

    def shun(self, index: int) -> None:
        """A node is slow: others are preferred to it."""
        self.nodes[index].slow = True

    # -- who takes part ------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """By node rank."""
        return self.assignment.nodes

    def is_member(self, index: int) -> bool:
        """Whether a node takes part in the present generation."""
        return index in self.assignment

    def left_out(self) -> dict[int, list[int]]:
        """By member, the devices that are left out because they do not work."""
        return {index: sorted(self.nodes[index].dead) for index in sorted(self._wounded) if index in self.assignment}

    def failure_domains(self) -> tuple[str, ...]:
        """Of the members, by node rank, as the fabric tells; empty where it does not."""
        return fabric.failure_domains([self.nodes[index].place for index in self.members])

    def joined(self) -> list[int]:
        """The nodes that have an agent."""
        return [index for index, node in enumerate(self.nodes) if node.joined]

    def spare(self, *, slow: bool = False) -> int | None:
        """A node that stands by, if there is one. Args: slow: one to which others are preferred, too."""
        return min(
            (index for index in self._standing_by if index not in self._wounded and (slow or not self.nodes[index].slow)),
            default=None,
        )

    def start(self, members: Sequence[int]) -> None:
        """A generation of these nodes, by node rank, begins."""
        counts = shares([self._able(index) for index in members], self._rules)
        fewer = {}
        for index, count in zip(members, counts, strict=True):
            if count < self._rules.procs:
                working = [device for device in range(self._rules.procs) if device not in self.nodes[index].dead]
                fewer[index] = tuple(working[:count])
        self.assignment, self._started = RankAssignment(members, counts, fewer), True
        for index in members:
            self.nodes[index].ready_port, self.nodes[index].gone = None, False
        self._awaited = set(members)
        self._standing_by = {index for index, node in enumerate(self.nodes) if node.ready and index not in self.assignment}

    def choose(self, now_s: float) -> tuple[int, ...] | None:
        """The members of the next generation by node rank; None while somebody is worth waiting for, or too few are there."""
        for index in self._awaited:
            if self.nodes[index].joined or now_s < self.nodes[index].until_s:
                return None  # it ends its workers, or starts up: nobody takes its place
        if any(self.nodes[index].ready_port is None and now_s < self.nodes[index].until_s for index in self._unfit):
            return None  # it has not told yet what it holds
        standing_by = sorted(self._standing_by, key=lambda index: (*self._merit(index), -index))  # the best last
        places = [index if self.nodes[index].ready else None for index in self.members]
        places += [None] * (self.wanted - len(places))
        for at, taken in enumerate(places):  # nobody who is ready gives way before all places are taken
            if taken is None and standing_by:
                places[at] = standing_by.pop()
        chosen = [index for index in places if index is not None]
        for at in sorted(range(len(chosen)), key=lambda at: self._merit(chosen[at])) if standing_by else ():
            if not standing_by or self._merit(standing_by[-1]) <= self._merit(chosen[at]):
                break
            chosen[at] = standing_by.pop()
        if len(chosen) < self.wanted and any(now_s < until_s for until_s in self._held_for.values()):
            return None
        if len(chosen) < self.wanted and any(self._worth_it(node, now_s) for node in self.nodes if not node.ready):
            return None
        if not self._started:  # later ranks stay where their snapshots are
            chosen = [chosen[at] for at in fabric.ordered([self.nodes[index].place for index in chosen], self._stage_nodes)]
        counts = shares([self._able(index) for index in chosen], self._rules)
        return tuple(index for index, count in zip(chosen, counts, strict=True) if count) if counts else None

    def _worth_it(self, node: Node, now_s: float) -> bool:
        return not node.unfit and now_s < node.until_s and (node.joined or now_s < self._patient_s)

    def _able(self, index: int) -> int:
        """How many devices of a node work."""
        return self._rules.procs - len(self.nodes[index].dead)

    def _usable(self, index: int) -> int:
        return self._rules.usable(self._able(index))

    def _merit(self, index: int) -> tuple[int, bool]:
        """Of two nodes the one with more is preferred."""
        return self._usable(index), not self.nodes[index].slow

    def _world(self, indexes: Iterable[int], count: int | None = None) -> int:
        """How many ranks a generation of these nodes has at the most; 0 if there can be none. Args: count: of them, if known."""
        if self._wounded:
            best = sorted((self._able(index) for index in indexes), reverse=True)[: self.wanted]
            return sum(shares(best, self._rules))
        return whole(min(self.wanted, count if count is not None else sum(1 for _ in indexes)), self._rules)

    def can_grow(self) -> bool:
        """Whether a generation with what stands by would be larger."""
        if not self._standing_by:
            return False
        return (
            self._world((*self.members, *self._standing_by), len(self.members) + len(self._standing_by))
            > self.assignment.world_size
        )

    def fewer(self) -> int:
        """With how many ranks the run can go on, without the nodes that are gone now; 0 if not at all."""
        there = (index for index in range(len(self.nodes)) if index not in self._absent and index not in self._unfit)
        return self._world(there, len(self.nodes) - len(self._absent) - len(self._unfit))

    def overdue(self, now_s: float) -> set[int]:
        """Nodes without an agent that nobody waits for any more."""
        return {index for index in self._absent if now_s >= self.nodes[index].until_s}

    def hopeless(self, now_s: float) -> str | None:
        """Why no generation can start with what is there or may come; None if one can."""
        if self.fewer():
            return None
        late = sorted(index for index in self._absent if now_s >= self.nodes[index].back_s)
        never = self._unfit.union(late)
        left = len(self.nodes) - len(never)
        if self._world((index for index in range(len(self.nodes)) if index not in never), left):
            return None
        least = -(-self._rules.worlds[0] // self._rules.procs)
        reasons = [self.nodes[index].why for index in sorted(self._unfit)]
        reasons += [
            f"node {index} has left the job"
            if index in self._departed
            else f"the agent of node {index} does not start ({self.nodes[index].why or 'nothing is heard of it'})"
            for index in late[:8]
        ]
        reasons += [f"nor do those of {len(late) - 8} more"] if len(late) > 8 else []
        what = f"a generation takes {least} node{'s' * (least > 1)}, and there {'is' if left == 1 else 'are'} {left}"
        return "; ".join([*reasons, what])
