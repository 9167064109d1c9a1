"""Roll-backs of this job: where the next generation goes back to, and what it leaves out. `resilient.recovery.rollback` chooses."""

from collections.abc import Iterable

from resilient.outbox import Outbox
from resilient.recovery.faults import Fault
from resilient.recovery.rollback import RollBack, Stretch, bad_numbers, data_of, merged
from resilient.snapshots import Snapshots


class RollBacks:
    """Invariant: `go_back_to` is set from a roll-back until the first step that is finished after it.

    Args:
        skip: what earlier jobs leave out.
    """

    def __init__(self, snapshots: Snapshots, skip: Iterable[Stretch]) -> None:
        self._snapshots = snapshots
        self.done: list[tuple[Fault, RollBack]] = []
        self.go_back_to: int | None = None
        self.skip: list[Stretch] = list(skip)

    def roll_back(self, back: RollBack, fault: Fault, out: Outbox) -> None:
        """What was computed beyond a step is invalid, whoever holds it."""
        self.done.append((fault, back))
        self.go_back_to = back.step
        if back.skip is not None:
            self.skip = merged([*self.skip, back.skip])
        self._snapshots.roll_back(back.step, f"rolled back to step {back.step}: {fault.detail}", out)

    def given_up(self, fault: Fault, out: Outbox) -> None:
        """Nothing of bad numbers becomes durable, and takes the place of what is sound."""
        if bad_numbers(fault):
            self._snapshots.roll_back(data_of(fault)[0] - 1, fault.detail, out)

    def step_finished(self) -> None:
        """A generation has come to a step of its own."""
        self.go_back_to = None
