"""Inspections: all ranks that may be to blame for a silence are inspected by their agents before anything is done about it.

Not all ranks of a large world: the stacks of 16,384 ranks tell no more than those of a thousand, and cost seconds. Asked are the
nodes of the suspected ranks, and beside them the nodes whose ranks lag behind most or have shown no activity for longest: whoever
holds up the others has gone silent before them. `NODES_ASKED` of each kind at most; in a smaller world that is everybody.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from resilient.control.liveness import Rank, Suspicion
from resilient.outbox import Outbox
from resilient.protocol.messages import Inspect, Inspection

PATIENCE_S = 5.0  # for agents to answer
NODES_ASKED = 64


@dataclass
class Case:
    """An inspection that is under way.

    Attributes:
        asked_s, deadline_s: attended seconds; whoever has not answered by the deadline does not.
        waiting: nodes that have not answered.
    """

    suspicion: Suspicion
    asked_s: float
    deadline_s: float
    nodes: tuple[int, ...]
    waiting: set[int]
    found: dict[int, Inspection] = field(default_factory=dict)


class Inspector:
    """Invariant: at most one inspection is under way, of ranks of the present generation.

    Args:
        node_rank_of: a rank.
    """

    def __init__(self, node_rank_of: Callable[[int], int]) -> None:
        self._node_rank_of = node_rank_of
        self._case: Case | None = None
        self._patient_until_s = 0.0

    def idle(self, now_s: float) -> bool:
        """Whether a suspicion may be followed up now."""
        return self._case is None and now_s >= self._patient_until_s

    def wait(self, until_s: float) -> None:
        """Nothing is followed up until then: what the ranks wait for may come back."""
        self._patient_until_s = until_s

    def drop(self) -> None:
        """The generation is over."""
        self._case = None

    def begin(
        self,
        suspicion: Suspicion,
        alive: Mapping[int, Rank],
        members: Sequence[int],
        now_s: float,
        generation: int,
        out: Outbox,
        *,
        early: bool = False,
    ) -> None:
        """Ask the agents. Args: members: nodes by node rank; early: of ranks, too, that have not shown any activity."""
        asked = tuple(members[node_rank] for node_rank in self._asked(suspicion, alive, len(members)))
        self._case = Case(suspicion, now_s, now_s + PATIENCE_S, asked, set(asked))
        for node in asked:
            out.send(node, Inspect(generation=generation, early=early))

    def _asked(self, suspicion: Suspicion, alive: Mapping[int, Rank], count: int) -> list[int]:
        """Node ranks of the nodes that are asked, ascending."""
        if count <= NODES_ASKED:
            return list(range(count))
        behind = self._behind(alive, alive)
        suspected = self._behind(suspicion.ranks, alive)[:NODES_ASKED]
        others = [node_rank for node_rank in behind if node_rank not in set(suspected)][:NODES_ASKED]
        return sorted([*suspected, *others])

    def _behind(self, ranks: Iterable[int], alive: Mapping[int, Rank]) -> list[int]:
        """The node ranks of these ranks, those first whose ranks are furthest behind, or have been silent for longest."""
        first: dict[int, tuple[int, float]] = {}
        for number in ranks:
            if number in alive:
                lag = alive[number].heartbeat.step, alive[number].active_s
                node_rank = self._node_rank_of(number)
                first[node_rank] = min(lag, first.get(node_rank, lag))
        return sorted(first, key=lambda node_rank: (first[node_rank], node_rank))

    def on_inspected(self, node: int, found: Mapping[int, Inspection]) -> None:
        """A node has answered."""
        if self._case is not None and node in self._case.waiting:
            self._case.found.update(found)
            self._case.waiting.discard(node)

    def finished(self, now_s: float) -> Case | None:
        """The inspection, once, when all have answered or the deadline has passed; None before."""
        case = self._case
        if case is None or (case.waiting and now_s < case.deadline_s):
            return None
        self._case = None
        return case
