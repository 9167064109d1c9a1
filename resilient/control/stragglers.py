"""Stragglers: ranks that need clearly longer for their own part of a step than others that have the same to do.

A slow rank makes all others wait in the next collective, so that steps take equally long everywhere. What tells it apart is its
*own time*: what its training thread computed, or wanted to while something else had its core, and what its samples took. Waiting
for others is not in it.

Owns the judgement: heartbeats go in, the beginning and the end of an episode come out. A heartbeat costs the same however many
ranks there are; all are compared once a window, in O(n log n).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from resilient.control.liveness import WARM_STEPS
from resilient.protocol.messages import Heartbeat
from resilient.recovery.faults import NAMED, Fault, more

WINDOWS = 2  # in a row, before a straggler is told, or forgotten
COST = 0.1  # own time beyond that of the others, as a share of the step: with less, nobody waits for it
COST_S = 0.01  # nor with less than so much: what the first rank writes down would be enough where steps are tiny
WINDOW_S = 1.0  # a window is no shorter
BACK = 0.5  # of the factor's excess: who is nearer to the others than that is none any more


@dataclass(frozen=True)
class Rules:
    """What makes a straggler.

    Attributes:
        factor: own time over the median of the others at the same place.
        window_steps: over which it is measured, at the least; and no less than `WINDOW_S`.
    """

    factor: float
    window_steps: int


@dataclass(frozen=True)
class Episode:
    """A straggler was found, or `over`: it is none any more.

    Attributes:
        factor: own time over that of the others, in the window in which it was found.
        own_s: of all ranks, per step; `usual_s`: what is usual at the place of this one.
        number: of the episode in its generation, 1-based; it ends with the number that it began with.
    """

    rank: int
    over: bool
    step: int
    factor: float
    usual_s: float
    own_s: Mapping[int, float]
    window_steps: int
    number: int

    def fault(self, fault_id: str, node: int) -> Fault:
        """What is told of it. Args: node: that the rank is on."""
        return Fault(
            fault_id=fault_id,
            kind="straggler",
            cause=f"rank {self.rank}",
            ranks=(self.rank,),
            nodes=(node,),
            step=self.step + 1,
            detail=(
                f"rank {self.rank} on node {node} needs {self.factor:.2f} times as long as the others for its part of a step: "
                f"{self.own_s[self.rank] * 1e3:.1f} ms, {self.usual_s * 1e3:.1f} ms is usual, in the last {self.window_steps} steps"
            ),
            evidence=self._evidence(),
            detect_s=0.0,
        )

    def _evidence(self) -> str:
        """The own times of this rank and of those that are slowest beside it."""
        slowest = sorted(self.own_s, key=lambda rank: (rank != self.rank, -self.own_s[rank], rank))[:NAMED]
        slowest_ranks = ", ".join(f"rank {rank} {self.own_s[rank] * 1e3:.1f} ms" for rank in sorted(slowest))
        return f"own time of a step: {slowest_ranks}{more(len(self.own_s) - len(slowest))}"


@dataclass(frozen=True)
class _Sample:
    step: int
    t: float
    own_s: float


@dataclass
class _Rank:
    first_step: int
    began: _Sample | None = None
    latest: _Sample | None = None
    base_s: float | None = None  # of its first window
    high: int = 0  # windows in a row above the factor
    low: int = 0
    episode: int = 0  # the number of the episode that goes on


class Stragglers:
    """One for the whole job. Invariant: `_finished` are the ranks whose window is over."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._ranks: dict[int, _Rank] = {}
        self._finished: set[int] = set()
        self._episodes = 0
        self._place_ranks, self._longer_ranks = 1, 0

    def begin(self, place_ranks: int, longer_ranks: int = 0) -> None:
        """A generation begins: its ranks are other processes, and may be elsewhere.

        Args:
            place_ranks: as many ranks, one after the other, have the same to do: those of a stage of the pipeline.
            longer_ranks: but the first ones of each stage have a micro batch more than the others.
        """
        self._ranks, self._finished, self._episodes = {}, set(), 0
        self._place_ranks, self._longer_ranks = place_ranks, longer_ranks

    def on_heartbeat(self, rank: int, heartbeat: Heartbeat) -> None:
        """A rank has been heard of; nobody can judge one without `own_s`."""
        step = heartbeat.step
        if heartbeat.own_s is None or step < 0:
            return
        known = self._ranks.setdefault(rank, _Rank(step))
        if known.latest is None or step > known.latest.step:
            known.latest = latest = _Sample(step, heartbeat.beat_t, heartbeat.own_s)
            if known.began is None and step - known.first_step >= WARM_STEPS:
                known.began = latest
            began = known.began
            if began is not None and step - began.step >= self.rules.window_steps and latest.t - began.t >= WINDOW_S:
                self._finished.add(rank)

    def judge(self) -> tuple[Episode, ...]:
        """The episodes that begin or end with a window; none while any rank has not finished its own."""
        if not self._ranks or len(self._finished) < len(self._ranks):
            return ()
        self._finished = set()
        own: dict[int, float] = {}
        steps: dict[int, int] = {}
        step_s: list[float] = []
        for rank, known in self._ranks.items():
            began, latest = known.began, known.latest
            assert began is not None and latest is not None
            steps[rank] = latest.step - began.step
            own[rank] = (latest.own_s - began.own_s) / steps[rank]
            step_s.append((latest.t - began.t) / steps[rank])
            known.began = latest
        least_s = max(COST_S, COST * median(step_s))
        usual = self._usual(own)
        found = []
        for rank, known in self._ranks.items():
            usual_s = usual[rank]
            if usual_s is not None and known.latest is not None:
                factor, number = own[rank] / usual_s if usual_s > 0 else 1.0, known.episode
                if self._changed(known, factor, own[rank] - usual_s > least_s):
                    over = not known.episode
                    step = known.latest.step
                    found.append(Episode(rank, over, step, factor, usual_s, own, steps[rank], known.episode or number))
        for rank, known in self._ranks.items():
            known.base_s = own[rank] if known.base_s is None else known.base_s
        return tuple(found)

    def _usual(self, own: Mapping[int, float]) -> dict[int, float | None]:
        """The own time that is to be expected of each rank; None where there is nothing to compare it with."""
        places: dict[tuple[int, bool], list[int]] = {}
        for rank in own:
            stage, place = divmod(rank, self._place_ranks)
            places.setdefault((stage, place < self._longer_ranks), []).append(rank)
        changes = {rank: own[rank] / known.base_s for rank, known in self._ranks.items() if known.base_s}
        ordered_changes = sorted(changes.values())
        usual: dict[int, float | None] = {}
        for peers in places.values():
            ordered = sorted(own[rank] for rank in peers)
            for rank in peers:
                if len(peers) > 1:
                    usual[rank] = _median_without(ordered, own[rank])
                    continue
                # Alone at its place: compared with its own first window, as the others have changed since theirs.
                base_s = self._ranks[rank].base_s
                others = len(ordered_changes) - (rank in changes)
                change = _median_without(ordered_changes, changes.get(rank)) if others else None
                usual[rank] = base_s * change if base_s is not None and change is not None else None
        return usual

    def _changed(self, known: _Rank, factor: float, costly: bool) -> bool:
        """Whether an episode begins or ends with this window."""
        back = 1.0 + BACK * (self.rules.factor - 1.0)
        known.high = known.high + 1 if factor >= self.rules.factor and costly else 0
        known.low = known.low + 1 if factor < back or not costly else 0
        if not known.episode and known.high >= WINDOWS:
            self._episodes += 1
            known.episode = self._episodes
            return True
        if known.episode and known.low >= WINDOWS:
            known.episode = 0
            return True
        return False


def _median_without(ordered: Sequence[float], value: float | None) -> float:
    """The median of an ascending sequence without one of its values; with all of them where that is None."""
    left_out = bisect_left(ordered, value) if value is not None else len(ordered)
    count = len(ordered) - (value is not None)

    def at(index: int) -> float:
        return ordered[index + (index >= left_out)]

    return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2
