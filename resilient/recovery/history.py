"""The faults of a job, oldest first, and what decisions ask of them.

Faults that come after one generation and before the next, as of nodes that are lost together, have ended one *attempt*, and count
as one. Thousands may come so, and each is decided on: a question costs what attempts there were, and not what faults. Pure.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from resilient.recovery.attempts import Attempt, got_on
from resilient.recovery.faults import Fault

Key = int | tuple[int]
"""An attempt: its generation; where that is not known, each fault has ended one of its own, and the key has the fault's number."""


@dataclass
class _Part:
    """The faults of an attempt at one step, by their numbers. Attributes: losses: of each node that was lost, the last one."""

    losses: dict[int, int] = field(default_factory=dict)
    others: list[int] = field(default_factory=list)


@dataclass
class _Ended:
    """An attempt. Attributes: last: number of the last fault that ended it; newest_t: when that was, unix seconds."""

    last: int
    newest_t: float
    parts: dict[int | None, _Part] = field(default_factory=dict)


class History:
    """Faults with the time at which each was handled, unix seconds; they are numbered from 0.

    Invariants: the faults from number `_begin` on are those since which there was no progress; `_ended` has each fault once, but of
    losses of one node at one step in one attempt the last alone; `_alike` and `_lost` have the numbers in order.
    """

    def __init__(self, faults: Iterable[tuple[float, Fault]] = ()) -> None:
        self._faults: list[tuple[float, Fault]] = []
        self._ended: dict[Key, _Ended] = {}
        self._alike: dict[tuple[str, str, int | None], list[int]] = {}  # by signature
        self._lost: dict[tuple[int, ...], list[int]] = {}  # by nodes
        self._lost_after: dict[int | None, list[int]] = {}  # by generation
        self._begin, self._furthest = 0, -1
        self._tried: list[Attempt] = []
        for t, fault in faults:
            self.append(t, fault)

    def append(self, t: float, fault: Fault) -> None:
        """One more was handled."""
        number = len(self._faults)
        if self._is_progress(fault):
            self._begin, self._furthest = number, _step(fault)
        if fault.attempt is not None:
            self._tried.append(fault.attempt)
        self._faults.append((t, fault))
        ended = self._ended.setdefault(_key(number, fault), _Ended(number, t))
        ended.last, ended.newest_t = number, max(t, ended.newest_t)
        part = ended.parts.setdefault(fault.step, _Part())
        if fault.kind == "node_lost":
            self._lost.setdefault(fault.nodes, []).append(number)
            self._lost_after.setdefault(fault.generation, []).append(number)
        if fault.kind == "node_lost" and len(fault.nodes) == 1 and fault.files is None:
            part.losses[fault.nodes[0]] = number
        else:
            part.others.append(number)
        self._alike.setdefault(fault.signature, []).append(number)

    def __len__(self) -> int:
        return len(self._faults)

    def __iter__(self) -> Iterator[tuple[float, Fault]]:
        return iter(self._faults)

    def __reversed__(self) -> Iterator[tuple[float, Fault]]:
        return reversed(self._faults)

    def since(self, number: int) -> Sequence[tuple[float, Fault]]:
        """Those from a number on."""
        return self._faults[number:]

    # -- what is asked before another fault is appended ----------------------------------------------------------------

    def begin(self, fault: Fault) -> int:
        """The number of the first fault of the stretch that a new one belongs to: between them no step was finished at which one of
        them had failed, and of their attempts none but the first got on."""
        return len(self._faults) if self._is_progress(fault) else self._begin

    def failures(self, fault: Fault, begin: int) -> int:
        """How many attempts were ended from a number on, with that which a new fault ends."""
        return self._with(fault, (key for key, ended in self._ended.items() if ended.last >= begin))

    def same(self, fault: Fault, begin: int) -> int:
        """How many by what has a new fault's signature, that one included."""
        alike = self._alike.get(fault.signature, ())
        return self._with(fault, (self._key(number) for number in alike if number >= begin))

    def at_step(self, fault: Fault, begin: int, left: Set[int], counts: Callable[[Fault], bool]) -> int:
        """How many at the step of a new fault, that one included.

        Args:
            left: nodes whose loss counts no more; counts: whether a fault does, that one and any but the loss of a node.
        """
        found = (
            key
            for key, ended in self._ended.items()
            if ended.last >= begin
            and (part := ended.parts.get(fault.step)) is not None
            and any(number >= begin for number in self._counting(part, left, counts))
        )
        return self._with(fault, found) if counts(fault) else sum(1 for _ in found)

    def after(self, t: float, fault: Fault, left: Set[int], counts: Callable[[Fault], bool]) -> int:
        """How many later than a time, without that which a new fault ends. Args: as of `at_step`."""
        own = fault.generation
        return sum(
            any(self._faults[number][0] > t for part in ended.parts.values() for number in self._counting(part, left, counts))
            for key, ended in self._ended.items()
            if ended.newest_t > t and (own is None or key != own)
        )

    def lost_alone(self, t: float, fault: Fault) -> int:
        """How many later than a time by the loss of the nodes of a new fault and of no others, that one included; 0 where that is
        no loss, or others were lost as well."""
        if fault.kind != "node_lost" or self._others_lost(t, fault.nodes, fault.generation):
            return 0
        own = [number for number in self._lost.get(fault.nodes, ()) if self._faults[number][0] > t]
        generations = {self._faults[number][1].generation for number in own}
        alone = {each for each in generations if not self._others_lost(t, fault.nodes, each)}
        return self._with(fault, (self._key(number) for number in own if self._faults[number][1].generation in alone))

    # -- what that is made of ------------------------------------------------------------------------------------------

    def _is_progress(self, fault: Fault) -> bool:
        return _step(fault) > self._furthest or (fault.attempt is not None and got_on(fault.attempt, self._tried))

    def _key(self, number: int) -> Key:
        return _key(number, self._faults[number][1])

    def _with(self, fault: Fault, keys: Iterable[Key]) -> int:
        """How many attempts these are, with that of a new fault."""
        return len({*keys, _key(len(self._faults), fault)})

    def _counting(self, part: _Part, left: Set[int], counts: Callable[[Fault], bool]) -> Iterator[int]:
        yield from (number for number in part.others if counts(self._faults[number][1]))
        yield from (part.losses[node] for node in (part.losses.keys() - left if left else part.losses))

    def _others_lost(self, t: float, nodes: tuple[int, ...], generation: int | None) -> bool:
        lost = (self._faults[number] for number in reversed(self._lost_after.get(generation, ())))
        return any(lost_t > t and each.nodes != nodes for lost_t, each in lost)


def _key(number: int, fault: Fault) -> Key:
    return (number,) if fault.generation is None else fault.generation


def _step(fault: Fault) -> int:
    return -1 if fault.step is None else fault.step
