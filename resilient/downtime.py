"""Downtime: for how long a campaign stood still, each second once, however many faults met in it.

A fold over the lines of the ledger, with a state of a few numbers. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Line = Mapping[str, Any]


@dataclass
class Downtime:
    """What incidents have cost so far.

    Invariant: the stretches that are counted do not overlap, and lie between the beginnings of jobs and the last line.

    Attributes:
        down_s: from what went wrong to the first step after it, over all incidents.
        lost_steps: that were computed again.
        floor_t: what lies before was counted, or belongs to another job; unix seconds.
        incident_id: of the incident that was recovered from last.
        until_t: when; unix seconds.
        counted_s, counted_steps: what of it is in the sums.
    """

    down_s: float = 0.0
    lost_steps: int = 0
    floor_t: float = 0.0
    incident_id: str = ""
    until_t: float = 0.0
    counted_s: float = 0.0
    counted_steps: int = 0

    def take(self, line: Line) -> None:
        """The next line of the ledger."""
        match line.get("event"):
            case "run_started":  # ids of faults are those of a job
                self._begin("", float(line["t"]))
            case "recovered" if line["downtime_s"] > 0 or line["lost_steps"] > 0:
                self._recovered(line)

    def _begin(self, incident_id: str, floor_t: float) -> None:
        self.incident_id, self.floor_t, self.until_t = incident_id, max(self.floor_t, floor_t), floor_t
        self.counted_s, self.counted_steps = 0.0, 0

    def _recovered(self, line: Line) -> None:
        """All faults of an incident are over with the same step: the one that lasted longest has all its time in it."""
        incident_id, t = line.get("incident_id") or line["fault_id"], float(line["t"])
        if incident_id != self.incident_id:
            self._begin(incident_id, self.until_t)
        self.until_t = max(self.until_t, t)
        down_s, lost_steps = max(0.0, min(float(line["downtime_s"]), t - self.floor_t)), line["lost_steps"]
        self.down_s += max(0.0, down_s - self.counted_s)
        self.lost_steps += max(0, lost_steps - self.counted_steps)
        self.counted_s, self.counted_steps = max(self.counted_s, down_s), max(self.counted_steps, lost_steps)


def downtime(events: Iterable[Line]) -> Downtime:
    """What the incidents of a ledger have cost."""
    found = Downtime()
    for line in events:
        found.take(line)
    return found
