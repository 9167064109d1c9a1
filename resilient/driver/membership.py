"""Membership: which nodes of the allocation take part in the next generation; as a state machine without input or output.

A node is a place of the allocation with an agent on it, or none. The first ones compute, the others are spares: their agents stand
by with torch imported. A spare takes the node rank of a node that is gone, so that all other ranks stay where their snapshots are.
Where there is none, the run waits a moment for the node to return, then goes on with as many as the layout allows, and takes in
what has returned later on. The ranks of a node follow each other, and tensor-parallel groups lie inside a node.

Owns who is there and who is a member; when generations end and start is the coordinator's.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LAUNCH_ATTEMPTS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
JOIN_S = 600.0  # for an agent's first start; a thousand nodes import torch from one file system
BACK_S = 120.0  # for an agent that is started anew, where nothing goes on without it
READY_S = 60.0  # from an agent's hello until it must have opened its store


@dataclass
class Node:
    """An agent, as far as it is known.

    Attributes:
        ready_port: of the store that it has opened for the next generation; None while it has not.
        skew_s: its clock is so far ahead of the driver's.
        failures: attempts to start it that came to nothing, in a row.
        launch_t: when it is to be started; None where it has been.
        until_t: for so long the next generation waits for it.
        back_t: and for so long where there would be none without it.
        gone: it was here, or could not be started; a spare may take its place.
        unfit: it takes no part, but what it holds is read and saved as any other node's.
        slow: it takes part only where no other can.
        why: it is gone, or unfit.
    """

    joined: bool = False
    ready_port: int | None = None
    host: str = ""
    addr: str = ""
    heard_t: float = 0.0
    skew_s: float = 0.0
    failures: int = 0
    launch_t: float | None = None
    until_t: float = 0.0
    back_t: float = 0.0
    gone: bool = False
    unfit: bool = False
    slow: bool = False
    why: str = ""

    @property
    def ready(self) -> bool:
        """Whether it waits for the next generation, and may take part."""
        return self.ready_port is not None and not self.unfit


class Membership:
    """The nodes, and which of them are members: those of the present generation, or of the last one, by node rank.

    Args:
        sizes: with so many nodes a generation may be; the largest is what the config asks for.
        spares: nodes beside those.
        rejoin_s: for so long a node that is gone is waited for, where no spare takes its place.
    """

    def __init__(self, sizes: Collection[int], spares: int, rejoin_s: float) -> None:
        self._sizes = sorted(sizes)
        self._rejoin_s = rejoin_s
        self.wanted = max(sizes)
        self.nodes = [Node() for _ in range(self.wanted + spares)]
        self.members: tuple[int, ...] = tuple(range(self.wanted))
        self._patient_t = 0.0  # until then, others than the members are waited for as well

    def begin(self, now: float) -> None:
        """The job begins: all are to be started."""
        for node in self.nodes:
            node.heard_t, node.launch_t, node.until_t, node.back_t = now, now, now + JOIN_S, now + JOIN_S
        self._patient_t = now + JOIN_S

    # -- news ----------------------------------------------------------------------------------------------------------

    def launches(self, now: float) -> list[int]:
        """The nodes whose agents are to be started now; they count as started."""
        due = [index for index, node in enumerate(self.nodes) if node.launch_t is not None and node.launch_t <= now]
        for index in due:
            self.nodes[index].launch_t = None
        return due

    def hello(self, index: int, host: str, addr: str, now: float, *, skew_s: float = 0.0) -> None:
        """An agent has connected."""
        node = self.nodes[index]
        node.joined, node.host, node.addr, node.skew_s = True, host, addr, skew_s
        node.until_t = max(node.until_t, now + READY_S)
        node.back_t = max(node.back_t, node.until_t)

    def is_ready(self, index: int, store_port: int) -> None:
        """An agent waits for the next generation, its new store open at this port."""
        self.nodes[index].ready_port, self.nodes[index].failures = store_port, 0

    def lost(self, index: int, why: str, now: float) -> None:
        """An agent is gone, or did not come to be; it is started again, the first time at once."""
        before = self.nodes[index]
        node = self.nodes[index] = Node(host=before.host, heard_t=now, gone=True, why=why)
        if before.joined:
            node.launch_t, node.until_t = now, now + self._rejoin_s
            node.back_t = now + max(self._rejoin_s, BACK_S)
            if index in self.members:
                self._patient_t = now + self._rejoin_s
            return
        node.failures = before.failures + 1
        node.launch_t = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (node.failures - 1))
        node.until_t, node.back_t = (before.until_t, before.back_t) if node.failures < LAUNCH_ATTEMPTS else (now, now)

    def refused(self, index: int, why: str) -> None:
        """A node is not fit to take part, until its agent is started anew."""
        node = self.nodes[index]
        node.gone, node.unfit, node.why = True, True, why

    def shun(self, index: int) -> None:
        """A node is slow: others are preferred to it."""
        self.nodes[index].slow = True

    # -- who takes part ------------------------------------------------------------------------------------------------

    def is_member(self, index: int) -> bool:
        """Whether a node takes part in the present generation."""
        return index in self.members

    def ranks(self, index: int, procs_per_node: int) -> tuple[int, ...]:
        """The ranks on a node; none on one that is no member."""
        if index not in self.members:
            return ()
        first = self.members.index(index) * procs_per_node
        return tuple(range(first, first + procs_per_node))

    def spare(self) -> int | None:
        """A node that stands by, if there is one."""
        return next((index for index in self._standing_by() if not self.nodes[index].slow), None)

    def _standing_by(self) -> list[int]:
        found = [index for index, node in enumerate(self.nodes) if node.ready and index not in self.members]
        return sorted(found, key=lambda index: self.nodes[index].slow)

    def start(self, members: Sequence[int]) -> None:
        """A generation of these nodes, by node rank, begins."""
        self.members = tuple(members)
        for index in members:
            self.nodes[index].ready_port, self.nodes[index].gone = None, False

    def choose(self, now: float) -> tuple[int, ...] | None:
        """The members of the next generation by node rank; None while somebody is worth waiting for, or too few are there."""
        for node in map(self.nodes.__getitem__, self.members):
            if not node.ready and not node.gone and (node.joined or now < node.until_t):
                return None  # it ends its workers, or starts up: nobody takes its place
        if any(node.unfit and node.ready_port is None and now < node.until_t for node in self.nodes):
            return None  # it has not told yet what it holds
        standing_by = self._standing_by()
        chosen: list[int] = []
        for index in self.members:
            better = standing_by and not (self.nodes[index].slow and self.nodes[standing_by[0]].slow)
            if self.nodes[index].ready and not (self.nodes[index].slow and better):
                chosen.append(index)
            elif standing_by:
                chosen.append(standing_by.pop(0))
        while len(chosen) < self.wanted and standing_by:
            chosen.append(standing_by.pop(0))
        if len(chosen) < self.wanted and any(self._worth_it(node, now) for node in self.nodes if not node.ready):
            return None
        size = self._fitting(len(chosen))
        return tuple(chosen[:size]) if size else None

    def _worth_it(self, node: Node, now: float) -> bool:
        return not node.unfit and now < node.until_t and (node.joined or now < self._patient_t)

    def _fitting(self, count: int) -> int:
        """The largest size of a generation that so many nodes can be; 0 if there is none."""
        return max((size for size in self._sizes if size <= count), default=0)

    def can_grow(self) -> bool:
        """Whether a generation with what stands by would be larger."""
        return self._fitting(len(self.members) + len(self._standing_by())) > len(self.members)

    def fewer(self, now: float) -> int:
        """With how many the run can go on, without those that are gone now; 0 if not at all."""
        return self._fitting(sum(node.joined and not node.unfit for node in self.nodes))

    def overdue(self, now: float) -> set[int]:
        """Nodes without an agent that nobody waits for any more."""
        return {index for index, node in enumerate(self.nodes) if not node.joined and now >= node.until_t}

    def hopeless(self, now: float) -> str | None:
        """Why no generation can start with what is there or may come; None if one can."""
        unfit = [index for index, node in enumerate(self.nodes) if node.unfit]
        late = [index for index, node in enumerate(self.nodes) if not node.joined and now >= node.back_t]
        least, left = self._sizes[0], len(self.nodes) - len(unfit) - len(late)
        if self._fitting(left):
            return None
        reasons = [self.nodes[index].why for index in unfit]
        reasons += [
            f"the agent of node {index} does not start ({self.nodes[index].why or 'nothing is heard of it'})" for index in late
        ]
        what = f"a generation takes {least} node{'s' * (least > 1)}, and there {'is' if left == 1 else 'are'} {left}"
        return "; ".join([*reasons, what])
