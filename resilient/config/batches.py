"""The global batch size over the course of training. Pure.

A ramp-up starts at a small batch and adds an increment each time an equal share of its samples is consumed (Smith et al., 2018).
"""

from collections.abc import Iterator, Mapping
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

    def _rises(self) -> Iterator[tuple[int, int]]:
        """The sizes below the full one, and how many batches of each there are."""
        total, rises = 0, -(-(self.full - self.start) // self.increment) if self.samples else 0
        while rises > 0 and total < self.samples:
            size, risen = self.at(total), total * rises // self.samples
            end = -(-(risen + 1) * self.samples // rises)  # from here on a batch is larger
            count = -(-(end - total) // size)
            yield size, count
            total += count * size

    def consumed(self, steps: int) -> int:
        """Samples consumed after so many steps."""
        total = 0
        for size, count in self._rises():
            count = min(count, steps)
            total, steps = total + count * size, steps - count
            if not steps:
                break
        return total + steps * self.full

    def steps(self, samples: int) -> int:
        """Steps until at least one and at most so many samples are consumed; the last batch is not cut."""
        total = steps = 0
        for size, count in self._rises():
            fit = min(count, max(0, samples - total) // size)
            total, steps = total + fit * size, steps + fit
            if fit < count:
                return max(1, steps)
        return max(1, steps + max(0, samples - total) // self.full)
