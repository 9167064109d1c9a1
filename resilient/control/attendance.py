"""Attendance: how long the driver was there, apart from how late it is.

A driver that is stopped, starved of a processor, or whose machine is suspended hears nothing, and that is its own silence. So all
deadlines of others run in *attended time*, which stands still while the driver is away. Its own tick tells it: that comes ten
times a second, so that a gap of more than `AWAY_S` is an absence. What was queued meanwhile may be handled before the next tick;
so every handler notes the time first.
"""

from dataclasses import dataclass

AWAY_S = 2.0  # since anything was handled last; a driver that is only busy ticks much sooner
LATE_S = 2.0  # for so long after an absence, what is handled may have been sent at any time in it


@dataclass(frozen=True)
class Moment:
    """When something is handled.

    Attributes:
        now: unix seconds: what is written down, and the deadlines of drains, which others have set.
        attended_s: the same without all the time that the driver was away: the deadlines of agents and workers.
        late_s: a message that is handled now may have been sent so much earlier than it seems.
    """

    now: float
    attended_s: float
    late_s: float = 0.0


class Attendance:
    """Invariant: attended time never goes back, and grows by at most `AWAY_S` between two calls."""

    def __init__(self) -> None:
        self._noted_t: float | None = None
        self._away_s = 0.0
        self._absence_s = 0.0
        self._back_t = float("-inf")

    def note(self, now: float) -> Moment:
        """Something is handled, or the tick has come, at `now`, unix seconds."""
        gap_s = now - self._noted_t if self._noted_t is not None else 0.0
        if gap_s > AWAY_S or gap_s < 0:  # below 0: the clock was set back, and nobody has waited less for that
            self._away_s += gap_s
        if gap_s > AWAY_S:
            self._absence_s, self._back_t = gap_s, now
        self._noted_t = now
        late_s = self._absence_s if 0 <= now - self._back_t <= LATE_S else 0.0
        return Moment(now, now - self._away_s, late_s)
