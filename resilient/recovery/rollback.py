"""Roll-backs: where to go back to when the numbers went bad, what is invalidated from then on, and which data is left out.

Pure. A roll-back takes the run to a checkpoint from before the trouble began, at each repeat to an older one; where the same data
is bad again, its steps are left out. What earlier generations had computed beyond that checkpoint is *invalidated*: it lies
on several tiers and may be found at any time, so it is described by a rule and not by a list. The ledger keeps the rules for later
jobs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from checkpoint.retention import superseded
from resilient.recovery.faults import Fault

Stretch = tuple[int, int]
"""First and last step, both included."""


@dataclass(frozen=True)
class InvalidationRule:
    """What generations up to this one computed beyond a step."""

    generation: int
    step: int

    def covers(self, step: int, generation: int) -> bool:
        """Whether what a generation computed up to `step` is invalidated."""
        return step > self.step and generation <= self.generation


@dataclass(frozen=True)
class RollBack:
    """Go on from a checkpoint that is not newer than `step`, and leave the steps of `skip` out."""

    step: int
    skip: Stretch | None = None


def bad_numbers(fault: Fault) -> bool:
    """Whether a fault puts the state in doubt, and not who computes it."""
    return fault.kind in ("not_finite", "loss_spike")


def data_of(fault: Fault) -> Stretch:
    """The steps whose numbers were bad."""
    last = fault.step or 1
    return max(1, min(fault.since or last, last)), last


def choose(
    fault: Fault, before: Sequence[tuple[Fault, RollBack]], checkpoints: Iterable[int], *, beginning: bool
) -> RollBack | None:
    """Where to go back to; None where nothing from before the trouble is left.

    Args:
        before: the roll-backs since there was progress, each with its fault.
        checkpoints: the steps that can be gone on from, as far as they are known; none are where a script keeps its own.
        beginning: the run may start over, since no checkpoint was ever given up for a newer one.
    """
    first, last = data_of(fault)
    known = sorted(set(checkpoints))
    furthest = min([first, *(each.step for _, each in before)]) - 1
    skip = _again((first, last), before)
    if not known:
        return RollBack(max(0, furthest), skip)
    sound = [step for step in ([0] if beginning else []) + known if step < first]
    if not sound:
        return None
    older = [step for step in sound if step <= furthest]
    return RollBack(max(older) if older else min(sound), skip)


def _again(data: Stretch, before: Sequence[tuple[Fault, RollBack]]) -> Stretch | None:
    """What is to be left out: these steps, with those that were bad before and that they touch; None where it may be the weights.

    It is the data if steps before it were computed anew, and well. A checkpoint from just before it may be bad itself.
    """
    (first, last), begins = data, data[0]
    proven = False
    for fault, done in before:
        for start, end in filter(None, (data_of(fault), done.skip)):
            if first <= end + 1 and start <= last + 1:
                first, last = min(first, start), max(last, end)
                proven |= done.step < begins - 1 or done.step == 0
    return (first, last) if proven else None


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same steps, ascending, in stretches that do not touch."""
    found: list[Stretch] = []
    for first, last in sorted(stretches):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def without_implied(rules: Iterable[InvalidationRule]) -> list[InvalidationRule]:
    """Without those that another one implies."""
    every = sorted(set(rules), key=lambda rule: (rule.generation, rule.step))
    return [v for v in every if not any(o != v and o.generation >= v.generation and o.step <= v.step for o in every)]


@dataclass
class DurableCheckpoints:
    """The durable checkpoints that there are, as far as that is known.

    Attributes:
        beginning: none was ever given up for a newer one.
    """

    keep_last: int
    steps: list[int] = field(default_factory=list)
    beginning: bool = True

    @classmethod
    def found(cls, steps: Iterable[int], keep_last: int) -> "DurableCheckpoints":
        """What a job finds when it starts; where there are as many as are kept, there may have been more."""
        every = sorted(steps)
        return cls(keep_last, every, len(every) < keep_last)

    def add(self, step: int) -> None:
        """One more is committed, and older ones are given up for it."""
        self.steps = sorted({*self.steps, step})
        gone = superseded(self.steps, self.keep_last, upto=step)
        self.beginning &= not gone
        self.steps = [each for each in self.steps if each not in gone]

    def roll_back(self, step: int) -> None:
        """Those that are newer are set aside."""
        self.steps = [each for each in self.steps if each <= step]
