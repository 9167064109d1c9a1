"""Stragglers: ranks that need clearly longer for their own part of a step than others that have the same to do.

A slow rank makes all others wait in the next collective, so that steps take equally long everywhere. What tells it apart is its
*own time*: what its training thread computed, or wanted to while something else had its core, and what its samples took. Waiting
for others is not in it.

Owns the judgement. Pure: samples go in, the beginning and the end of an episode come out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from resilient.driver.watchdog import WARM_STEPS
from resilient.faults import Fault

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

    def fault(self, fault_id: str, procs_per_node: int, members: Sequence[int]) -> Fault:
        """What is told of it. Args: members: the nodes by node rank."""
        node = members[self.rank // procs_per_node]
        own_s = self.own_s[self.rank]
        return Fault(
            fault_id=fault_id,
            kind="straggler",
            cause=f"rank {self.rank}",
            ranks=(self.rank,),
            nodes=(node,),
            step=self.step + 1,
            detail=(
                f"rank {self.rank} on node {node} needs {self.factor:.2f} times as long as the others for its part of a step: "
                f"{own_s * 1e3:.1f} ms, {self.usual_s * 1e3:.1f} ms is usual, in the last {self.window_steps} steps"
            ),
            evidence="own time of a step: " + ", ".join(f"rank {rank} {s * 1e3:.1f} ms" for rank, s in sorted(self.own_s.items())),
            detect_s=0.0,
        )


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
    told: int = 0  # the number of the episode that goes on


@dataclass
class Stragglers:
    """Args: rules. One for the whole job."""

    rules: Rules
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _episodes: int = 0
    _place_ranks: int = 1

    def begin(self, place_ranks: int) -> None:
        """A generation begins: its ranks are other processes, and may be elsewhere.

        Args:
            place_ranks: as many ranks, one after the other, have the same to do: those of a stage of the pipeline.
        """
        self._ranks, self._episodes, self._place_ranks = {}, 0, place_ranks

    def heard(self, rank: int, pulse: Mapping[str, Any]) -> None:
        """A rank's pulse: `step`, `beat_t` and `own_s`, which is None where nobody can tell."""
        own_s, step = pulse.get("own_s"), pulse["step"]
        if own_s is None or step < 0:
            return
        known = self._ranks.setdefault(rank, _Rank(step))
        if known.latest is None or step > known.latest.step:
            known.latest = _Sample(step, pulse["beat_t"], own_s)
            if known.began is None and step - known.first_step >= WARM_STEPS:
                known.began = known.latest

    def judge(self) -> Iterator[Episode]:
        """The episodes that begin or end with a window that all ranks have finished."""
        spans = {rank: (known.began, known.latest) for rank, known in self._ranks.items()}
        own: dict[int, float] = {}
        step_s: list[float] = []
        steps = 0
        for rank, (began, latest) in spans.items():
            if began is None or latest is None:
                return
            steps = latest.step - began.step
            if steps < self.rules.window_steps or latest.t - began.t < WINDOW_S:
                return
            own[rank] = (latest.own_s - began.own_s) / steps
            step_s.append((latest.t - began.t) / steps)
        if not own:
            return
        usual_step_s = median(step_s)
        for rank, known in self._ranks.items():
            known.began = known.latest
            usual_s = self._usual(rank, own)
            if usual_s is not None:
                factor = own[rank] / usual_s if usual_s > 0 else 1.0
                number = known.told
                if self._changed(known, factor, own[rank] - usual_s > max(COST_S, COST * usual_step_s)):
                    assert known.latest is not None
                    yield Episode(rank, not known.told, known.latest.step, factor, usual_s, own, steps, known.told or number)
        for rank, known in self._ranks.items():
            known.base_s = own[rank] if known.base_s is None else known.base_s

    def _usual(self, rank: int, own: Mapping[int, float]) -> float | None:
        """The own time that is to be expected of a rank; None where there is nothing to compare it with."""
        place = rank // self._place_ranks
        peers = [s for other, s in own.items() if other != rank and other // self._place_ranks == place]
        if peers:
            return median(peers)
        # Alone at its place: compared with its own first window, as the others have changed since theirs.
        base_s = self._ranks[rank].base_s
        changes = _changes(self._ranks, own, rank)
        return base_s * median(changes) if base_s is not None and changes else None

    def _changed(self, known: _Rank, factor: float, costly: bool) -> bool:
        """Whether an episode begins or ends with this window."""
        back = 1.0 + BACK * (self.rules.factor - 1.0)
        known.high = known.high + 1 if factor >= self.rules.factor and costly else 0
        known.low = known.low + 1 if factor < back or not costly else 0
        if not known.told and known.high >= WINDOWS:
            self._episodes += 1
            known.told = self._episodes
            return True
        if known.told and known.low >= WINDOWS:
            known.told = 0
            return True
        return False


def _changes(ranks: Mapping[int, _Rank], own: Mapping[int, float], rank: int) -> Sequence[float]:
    return [own[other] / known.base_s for other, known in ranks.items() if other != rank and known.base_s]
