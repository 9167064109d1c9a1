"""The global batch size over the course of training. Pure.

A ramp-up starts at a small batch and adds an increment each time an equal share of its samples is consumed (Smith et al., 2018).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes as a function of the samples consumed; all zero but `full` where there is no ramp-up."""

    full: int
    start: int = 0
    increment: int = 0
    samples: int = 0

    @classmethod
    def of(cls, train: Mapping[str, Any]) -> "BatchSizes":
        """From the values of the config's section `train`."""
        full = int(train.get("global_batch_size", 16))
        ramp = train.get("batch_rampup")
        if ramp is None:
            return cls(full)
        return cls(full, int(ramp["start"]), int(ramp["increment"]), int(ramp["samples"]))

    def at(self, consumed: int) -> int:
        """Size of the batch that begins when so many samples are consumed."""
        if consumed >= self.samples or self.start >= self.full:
            return self.full
        rises = -(-(self.full - self.start) // self.increment)
        return min(self.full, self.start + self.increment * (consumed * rises // self.samples))

    def sizes(self) -> list[int]:
        """Every size that occurs, the smallest first."""
        if not self.samples or self.start >= self.full:
            return [self.full]
        return [*range(self.start, self.full, self.increment), self.full]

    def consumed(self, steps: int) -> int:
        """Samples consumed after so many steps."""
        total = 0
        while steps and total < self.samples:
            total, steps = total + self.at(total), steps - 1
        return total + steps * self.full

    def steps(self, samples: int) -> int:
        """Steps until at least one and at most so many samples are consumed; the last batch is not cut."""
        total = count = 0
        while total < self.samples and total + self.at(total) <= samples:
            total, count = total + self.at(total), count + 1
        if total >= self.samples:
            count += max(0, samples - total) // self.full
        return max(1, count)
