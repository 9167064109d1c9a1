"""How long a phase may take, learned from how long workers stayed in it without activity before they went on."""

import math
from collections.abc import Collection
from dataclasses import dataclass

FACTOR = 5.0  # a phase may take so many times as long as nearly all that were seen
EVERY_STEP = ("step", "data")
COLLECTIVES = "collectives"  # between two signs of them, of a script of which nothing else is seen
OFTEN = (*EVERY_STEP, COLLECTIVES)
SELDOM_FACTOR = 15.0  # for phases that come seldom, and the first steps of a generation, where kernels are compiled
SELDOM_FLOOR_S = 60.0
KEPT = 300  # steps back from which is learned
QUANTILE = 0.99  # of them are usual
AGAIN = 2.0  # and what was longer may come again, so many times as long
NEEDED = 3
UNKNOWN = "start"  # the phase of a worker outside of all phases, where nobody says what it does
SAVES = "saves"  # phase `snapshot` where it is inferred: a checkpoint of the script's own takes longer than a copy in memory


@dataclass(frozen=True)
class Limits:
    """Seconds between which what is learned is kept."""

    floor_s: float
    ceiling_s: float


class Patience:
    """What was learned; it outlives generations.

    What was seen in a generation that trained faster counts as that much longer in one that is slower: fewer ranks compute the same
    batch. The other way round nothing counts for less, for how much faster a generation is, is an estimate.

    A timeout is computed anew only after its history has changed: of thousands of ranks that tell of the same step, few change it.

    Invariant: what is in `_timeouts_s` follows from `_seen` and `_rate`.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._rate = 1.0  # of training in the present generation
        self._seen: dict[str, dict[int, tuple[float, float]]] = {}  # by phase and step: longest silence of all ranks, and the rate
        self._timeouts_s: dict[str, float] = {}
        self._least_s = limits.floor_s

    def begin(self, rate: float) -> None:
        """A generation begins. Args: rate: of its training, as a share of the full one."""
        if rate != self._rate:
            self._rate = rate
            self._timeouts_s.clear()

    def bear(self, silent_s: float) -> None:
        """A silence that workers were ended for was no hang: however rare, it may come again, and be twice as long."""
        self._least_s = max(self._least_s, AGAIN * silent_s)
        self._timeouts_s.clear()

    def learn(self, phase: str, step: int, silent_s: float) -> None:
        """So long was a rank silent after this step. How many ranks there are, and how often they tell, makes no difference."""
        seen = self._seen.setdefault(phase, {})
        if step in seen and self._now_s(*seen[step]) >= silent_s:
            return
        seen[step] = silent_s, self._rate
        if len(seen) > KEPT:
            del seen[next(iter(seen))]
        self._timeouts_s.pop(phase, None)

    def timeout_s(self, phase: str) -> float:
        """How long a rank may be silent in a phase."""
        if phase not in self._timeouts_s:
            self._timeouts_s[phase] = self._computed_s(phase)
        return self._timeouts_s[phase]

    def _computed_s(self, phase: str) -> float:
        seen = [self._now_s(*each) for each in self._seen.get(phase, {}).values()]
        often = phase in OFTEN
        if phase == UNKNOWN or len(seen) < (NEEDED if often else 1):
            return self.limits.ceiling_s
        wanted = patience_s(seen) if often else max(SELDOM_FLOOR_S, SELDOM_FACTOR * max(seen))
        return min(self.limits.ceiling_s, max(self._least_s, wanted))

    def _now_s(self, silent_s: float, rate: float) -> float:
        """What was seen at a rate, in the present generation."""
        return silent_s * max(1.0, rate / self._rate)


def patience_s(seen: Collection[float]) -> float:
    """How long a step may take that has taken so long before: several times as long as nearly all, and the rare may come again.

    So a single slow step does not make the run wait many times as long for a hang.
    """
    ordered = sorted(seen)
    usual = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
    return max(FACTOR * usual, AGAIN * ordered[-1])
