"""When the ranks compare what they need: every ten seconds or so, at a step on which all of them have agreed.

Owns that decision. Pure: the clock is passed in.
"""

import math
from collections.abc import Iterable

REVIEW_S = 10.0


class Reviews:
    """For one rank. Steps go up.

    Invariant: what is due is the same on all ranks, as long as they settle at the same steps on the same proposals.
    """

    def __init__(self) -> None:
        self._next = 0
        self._last: tuple[int, float] | None = None  # step and time of the last one

    def due(self, step: int) -> bool:
        """Whether the ranks compare at this step, if they come by."""
        return step >= self._next

    def proposal(self, step: int, now: float) -> int:
        """After how many steps this rank would compare again; 1 where it does not know yet how long they take."""
        if self._last is None or step <= self._last[0]:
            return 1
        step_s = max(1e-6, (now - self._last[1]) / (step - self._last[0]))
        return max(1, math.floor(REVIEW_S / step_s))

    def settle(self, step: int, now: float, proposals: Iterable[int]) -> None:
        """The ranks have compared; the most careful of them decides when they do again."""
        self._next = step + min(proposals)
        self._last = step, now
