"""Cadence: at which steps a tier is due.

Owns the decision. Pure: the clock is passed in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PRIOR_S = 6 * 3600.0
"""Before anything has failed: as if one failure in so long had been seen."""

PATIENCE = 0.002
"""Share of the time since a tier's last snapshot for which the next one may wait for a buffer."""

LONGEST_WAIT_S = 5.0


@dataclass(frozen=True)
class Every:
    """When a tier wants a snapshot.

    Attributes:
        steps: at the multiples of so many steps; "auto" for the interval of Young and Daly; None for never by steps.
        seconds: at the first step after so long; None for never by time.
        cost: as often as snapshots take at most this share of the time; None for never by that. See `affordable`.
    """

    steps: int | Literal["auto"] | None = None
    seconds: float | None = None
    cost: float | None = None

    @property
    def timed(self) -> bool:
        """Whether one rank's clock decides for all."""
        return self.steps == "auto" or self.seconds is not None


def young_daly(stall_s: float, mtbf_s: float) -> float:
    """Seconds between snapshots that lose least, where each costs `stall_s` and failures come every `mtbf_s` on average.

    The first-order optimum sqrt(2 * stall * MTBF) of Young (1974); Daly's (2006) higher-order terms matter only where a snapshot
    takes a considerable share of the time between failures, and there its result is the MTBF.
    """
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(stall_s / (2 * mtbf_s))
    return max(0.0, math.sqrt(2 * stall_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - stall_s)


def mean_time_between_failures(failures: int, seconds: float) -> float:
    """From what was seen so far, with one failure in PRIOR_S as a prior."""
    return (seconds + PRIOR_S) / (failures + 1)


class Clock:
    """When each tier's last snapshot was, for one rank.

    Args:
        every: cadence by tier.
        mtbf_s: mean time between failures.
        now: seconds of a clock that only goes forward.

    Attributes:
        timed: one rank's clock must decide for all.
    """

    def __init__(self, every: Mapping[str, Every], mtbf_s: float, now: float) -> None:
        self._every = every
        self._mtbf_s = mtbf_s
        self._stalls: list[float] = []
        self._last = dict.fromkeys(every, now)
        self._asked: int | None = None  # the step that was asked about last
        self.timed = any(each.timed for each in every.values())

    def due(self, step: int, now: float) -> frozenset[str]:
        """The tiers that want a snapshot of this step. Of steps that are not asked about, as where they go up by two, the next one
        that is has their place."""
        before = self._asked if self._asked is not None and self._asked < step else step - 1
        self._asked = step
        return frozenset(name for name, every in self._every.items() if self._is_due(name, every, before, step, now))

    def _is_due(self, name: str, every: Every, before: int, step: int, now: float) -> bool:
        since = now - self._last[name]
        if every.seconds is not None and since >= every.seconds:
            return True
        if every.steps == "auto":
            from statistics import median  # not everybody who imports this has use for it

            # The first one comes at once: what it costs is not known before.
            return not self._stalls or since >= young_daly(median(self._stalls), self._mtbf_s)
        return every.steps is not None and step // every.steps > before // every.steps

    def patience_s(self, tiers: frozenset[str], now: float) -> float:
        """How long a snapshot for these tiers may wait for a buffer; left out, the rarest of them would be twice as old."""
        return min(LONGEST_WAIT_S, PATIENCE * max((now - self._last[name] for name in tiers), default=0.0))

    def taken(self, tiers: frozenset[str], stall_s: float, now: float) -> None:
        """A snapshot was taken for these tiers; training stood still for `stall_s`."""
        self._stalls = [*self._stalls, stall_s][-8:]
        for name in tiers:
            self._last[name] = now


def every_of(entry: Mapping[str, Any]) -> Every:
    """From JSON: members `every_steps`, `every_s` and `every_cost`."""
    return Every(entry.get("every_steps"), entry.get("every_s"), entry.get("every_cost"))
