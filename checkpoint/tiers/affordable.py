"""Snapshots that cost next to nothing: so many steps apart that they take at most a share of the time.

Owns the decision. What a snapshot takes and what a step takes is measured, on every rank; now and then the ranks agree on the
number of steps between two snapshots, so that in between the number of a step alone says whether it is one. Pure: the clock is
passed in.
"""

import math
from collections import deque
from collections.abc import Iterable

FIRST = 6  # steps with a snapshot each, by which is measured what one takes
REVIEW_S = 10.0  # between two agreements, at the least
REVIEW_STEPS = 8  # the same, in steps
KEPT = 16  # measurements
MOST_STEPS = 1_000_000


class Affordable:
    """For one rank. Steps go up by one.

    Invariant: what is due is the same on all ranks, as long as they settle on the same number at the same steps.

    Args:
        share: of the time that snapshots may take, above 0.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._costs: deque[float] = deque(maxlen=KEPT)
        self._steps_s: deque[float] = deque(maxlen=KEPT)
        self._last_t: float | None = None  # when the last step was asked about
        self._cost_s = 0.0  # of the snapshot since then
        self._newest = 0  # the last step of which a snapshot was due
        self._review: int | None = None
        self.every = 1

    def due(self, step: int) -> bool:
        """Whether a snapshot of this step is wanted; asked once of each step."""
        if step - self._newest < self.every:
            return False
        self._newest = step
        return True

    def asked(self, step: int, now: float) -> bool:
        """A step has ended; whether the ranks must settle before it is known if it is `due`."""
        if self._last_t is not None:
            self._steps_s.append(max(0.0, now - self._last_t - self._cost_s))
        self._last_t, self._cost_s = now, 0.0
        if self._review is None:
            self._review = step + FIRST
        return step >= self._review

    def taken(self, cost_s: float) -> None:
        """A snapshot was taken since the last step was asked about, and training stood still for it."""
        self._costs.append(cost_s)
        self._cost_s = cost_s

    def proposal(self) -> tuple[int, int]:
        """What this rank would settle on: how many steps apart snapshots may be, and after how many steps to look again."""
        if not self._costs or not self._steps_s:
            return self.every, FIRST
        step_s = max(1e-6, _undisturbed(self._steps_s))
        every = math.ceil(_undisturbed(self._costs) * (1.0 - self._share) / (self._share * step_s))
        return min(MOST_STEPS, max(1, every)), max(REVIEW_STEPS, math.ceil(REVIEW_S / step_s))

    def settle(self, step: int, proposals: Iterable[tuple[int, int]]) -> None:
        """The ranks have agreed: the most careful of them is heard."""
        every, review = zip(*proposals, strict=True)
        self.every = max(every)
        self._review = step + max(review)


def _undisturbed(seconds: Iterable[float]) -> float:
    """The lower quartile: what else the machine does makes single measurements longer, of steps and of snapshots alike."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]
