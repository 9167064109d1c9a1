"""What is on the durable tier, as far as it is known."""

from resilient.recovery.rollback import DurableCheckpoints
from resilient.snapshots.plan import StoragePlan


class Durable:
    """The committed checkpoints.

    Invariant: `step` grows with every commit; only a roll-back, or a start from an older checkpoint, takes it back.

    Attributes:
        step: the newest that is committed; 0: none.
        rate_bytes_per_s: of the last transfer, flush and commit together; None before the first.
    """

    def __init__(self, plan: StoragePlan) -> None:
        self.step = plan.durable_step
        self.rate_bytes_per_s: float | None = None
        self._committed = DurableCheckpoints.found(plan.durable_steps, plan.durable.keep_last)

    @property
    def steps(self) -> list[int]:
        return self._committed.steps

    @property
    def beginning(self) -> bool:
        """Whether no checkpoint was ever given up for a newer one, so that to start over loses no more than they do."""
        return self._committed.beginning

    def commit(self, step: int, size_bytes: int, took_s: float) -> None:
        """A step is committed."""
        self.step = max(self.step, step)
        self._committed.add(step)
        self.rate_bytes_per_s = size_bytes / took_s

    def roll_back(self, step: int) -> None:
        """What is newer than a step does not count any more."""
        self._committed.roll_back(step)
        self.step = min(self.step, max(self._committed.steps, default=0))
