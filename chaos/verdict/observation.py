"""What is known of a campaign after an experiment, in the form that a verdict is made of. Owns its shape, and reads nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from chaos.fault import Expectation
from chaos.verdict.matching import Line
from chaos.verdict.record import Injection
from resilient.account import Account


@dataclass(frozen=True)
class JobRun:
    """One start of the campaign: when, until when (unix seconds), and its exit code; negative for a signal."""

    began_t: float
    ended_t: float
    code: int


@dataclass(frozen=True)
class Weights:
    """Final weights against those of the reference run: arrays that differ or are missing on a side, and the largest distance.

    Attributes:
        largest: length of the difference against that of the longer array.
    """

    differing: Sequence[str] = ()
    largest: float = 0.0


@dataclass(frozen=True)
class Checked:
    """A checkpoint on the durable tier, and what is wrong with it; empty: every byte is as it was written."""

    path: str
    step: int
    damage: str = ""


@dataclass(frozen=True)
class Observation:
    """All that a verdict depends on.

    Attributes:
        injections: in order of time.
        expected: by id of injection.
        events, metrics: the lines of the run directory.
        jobs: in order; the last one is the one that must have reached the target.
        reference: lines of metrics of the same campaign without faults; None: there was none.
        weights: None where there was no reference run, or where neither has arrays.
        left: what is left behind, as `processes` and `files`, or changed, as `machine`.
        tolerance: relative, of losses and weights, from the first fault or shrinking on that is not exact.
        wall_s: of the whole experiment; 0: not known.
        left_out: faults that were not to be injected after all, with the reason: by id, those of a mix by kind.
    """

    experiment: str
    seed: int
    target_step: int
    injections: Sequence[Injection]
    expected: Mapping[str, Expectation]
    events: Sequence[Line]
    metrics: Sequence[Line]
    jobs: Sequence[JobRun]
    account: Account
    reference: Sequence[Line] | None = None
    weights: Weights | None = None
    checkpoints: Sequence[Checked] = ()
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tolerance: float = 0.0
    wall_s: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def roll_backs(self) -> list["RollBack"]:
        """In order."""
        lines = [line for line in self.events if line["event"] == "action" and (line["name"] == "roll_back" or "skip" in line)]
        return [RollBack(line["t"], int(line["step"]), line.get("skip") or []) for line in lines]

    def invalidated(self, line: Line) -> bool:
        """Whether what a line reports was rolled back later: it was computed anew, or left out."""
        return any(line["t"] < back.t and line["step"] > back.step for back in self.roll_backs)


@dataclass(frozen=True)
class RollBack:
    """When (unix seconds), to which step, and the stretches of steps that were left out from then on, both ends included."""

    t: float
    step: int
    skip: Sequence[Sequence[int]]
