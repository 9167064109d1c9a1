"""How the micro batches of a global batch are dealt out to the data-parallel replicas. Pure.

Micro batch m belongs to replica m mod dp, so that replicas differ by one at most and the first ones have more. A replica runs
*passes*: one for each micro batch that it has. Where every pass is a collective, and where a pipeline's schedule asks for a number,
it runs passes over empty micro batches beside them, in which no token counts.
"""

from dataclasses import dataclass

ROUNDS = ("interleaved_1f1b", "zero_bubble")  # schedules of several stages a rank, which run micro batches in rounds of equal size


@dataclass(frozen=True)
class Dealing:
    """Of one layout; see the module.

    Attributes:
        schedule: of the pipeline; without meaning where `pp` is 1.
        ramped: the size of the global batch changes in the course of the training.
        every: gradients are reduced in every pass.
    """

    dp: int
    pp: int
    schedule: str
    zero_stage: int
    ramped: bool = False
    every: bool = False

    def own(self, count: int, replica: int) -> range:
        """Of `count` micro batches, the numbers of those that a replica has."""
        return range(replica, count, self.dp)

    def most(self, count: int) -> int:
        """Micro batches of the replica that has most."""
        return -(-count // self.dp)

    def fuller(self, count: int) -> int:
        """Replicas, the first ones, that have as many as `most`; the others have one less."""
        return count % self.dp or self.dp

    def passes(self, count: int, replica: int) -> int:
        """Passes that a replica runs, over its own micro batches and then over empty ones."""
        wanted = self.most(count) if self.alike else max(1, len(self.own(count, replica)))
        if self.pp == 1:
            return wanted
        if self.schedule not in ROUNDS:
            return max(self.pp, wanted)  # GPipe and 1F1B fill the pipeline at least once
        return next(each for each in range(wanted, 2 * wanted + self.pp) if each % max(1, each // self.pp) == 0)

    @property
    def alike(self) -> bool:
        """Whether all replicas run as many passes: each exchanges parameters or gradients, or stages of a rank take turns."""
        if self.pp == 1:
            return self.every or self.zero_stage > 1
        # A pipeline that first runs a number of passes exchanges parameters: all replicas must begin with it at once.
        return self.every or self.ramped or self.zero_stage == 3 or self.schedule in ROUNDS

    def longer(self, count: int) -> int:
        """Replicas, the first ones, that run more passes than the others; 0 where all run as many."""
        fuller = self.fuller(count)
        return fuller if fuller < self.dp and self.passes(count, 0) > self.passes(count, self.dp - 1) else 0
