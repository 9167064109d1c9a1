"""The durable checkpoints of a campaign that were committed and not refused since, as its ledger tells of them.

A fold over the lines of the ledger, whose state stays small. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]

KEPT = 64  # the newest


@dataclass
class CommittedCheckpoints:
    """Attributes: found: tier, step, and when it was committed, in unix seconds; in that order."""

    found: list[tuple[str, int, float]] = field(default_factory=list)

    def take(self, line: Line) -> None:
        """The next line of the ledger."""
        tier = str(line.get("tier", ""))
        match line["event"]:
            case "committed":
                before = [each for each in self.found if each[:2] != (tier, line["step"])]
                self.found = [*before[1 - KEPT :], (tier, int(line["step"]), float(line["t"]))]
            case "checkpoint_rejected":  # what another tier had of the step may be damaged without this
                self.found = [each for each in self.found if each[1] != line["step"] or (tier and each[0] and each[0] != tier)]

    @property
    def steps(self) -> list[int]:
        """The steps, in order."""
        return sorted({step for _, step, _ in self.found})

    def newest(self) -> dict[str, tuple[int, float]]:
        """Of each tier: step, and when it was committed."""
        return {tier: (step, t) for tier, step, t in self.found}
