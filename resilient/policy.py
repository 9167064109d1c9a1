"""The recovery ladder: what to do about a fault.

Pure: (fault, history, budget, clock) to an action, by the first row of a table that holds. It sees no process and does nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from resilient.faults import Fault

ActionName = Literal["wait", "report", "restart_workers", "replace_node", "finish_drain", "give_up"]


@dataclass(frozen=True)
class Action:
    """What is done, and why in a sentence."""

    name: ActionName
    reason: str


@dataclass(frozen=True)
class Budget:
    """How much trouble is put up with."""

    max_restarts_per_hour: int
    give_up_after_same_step: int


@dataclass(frozen=True)
class Situation:
    """Everything that a decision may depend on.

    Attributes:
        fault: the one to decide on.
        earlier: (unix seconds, fault) of this job, oldest first, without `fault`.
        draining: a stop was asked for.
        now: unix seconds.
        outage: what a link of the group does or did a moment ago; None where all are well.
        link_grace_s: how long a stall may last before a link is no excuse any more.
        replace_stragglers: the node of a straggler is replaced, once; else it is only told.
    """

    fault: Fault
    earlier: Sequence[tuple[float, Fault]]
    budget: Budget
    draining: bool
    now: float
    outage: str | None = None
    link_grace_s: float = 0.0
    replace_stragglers: bool = False

    @property
    def same(self) -> int:
        """How often this very failure has happened, this time included."""
        return 1 + sum(fault.signature == self.fault.signature for _, fault in self.earlier)

    @property
    def in_last_hour(self) -> int:
        """How many faults before this one lie less than an hour back."""
        return sum(self.now - t < 3600 for t, _ in self.earlier)

    @property
    def worth_replacing(self) -> bool:
        """Whether the node of a straggler is to be replaced: not for a second time, nor for the last of the restarts."""
        before = any(fault.kind == "straggler" and fault.nodes == self.fault.nodes for _, fault in self.earlier)
        return self.replace_stragglers and not before and self.in_last_hour + 1 < self.budget.max_restarts_per_hour


@dataclass(frozen=True)
class Row:
    """One rung: when it applies, what is done, and why."""

    applies: Callable[[Situation], bool]
    action: ActionName
    reason: Callable[[Situation], str]


TABLE: tuple[Row, ...] = (
    Row(
        lambda s: s.draining,
        "finish_drain",
        lambda s: "a stop was asked for: the newest checkpoint is the state",
    ),
    Row(
        lambda s: s.fault.kind == "collective_timeout" and s.outage is not None and s.fault.detect_s < s.link_grace_s,
        "wait",
        lambda s: f"{s.outage}: transports go on by themselves; up to {s.link_grace_s:.0f} s are granted",
    ),
    Row(
        lambda s: s.fault.kind == "straggler" and not s.worth_replacing,
        "report",
        lambda s: "it slows the others down, and nothing is lost",
    ),
    Row(
        lambda s: s.fault.final is not None,
        "give_up",
        lambda s: "trying again cannot help",
    ),
    Row(
        lambda s: s.same >= s.budget.give_up_after_same_step,
        "give_up",
        lambda s: f"the same failure ({s.fault.detail}) at {_place(s.fault)} for the {ordinal(s.same)} time",
    ),
    Row(
        lambda s: s.in_last_hour >= s.budget.max_restarts_per_hour,
        "give_up",
        lambda s: f"{s.in_last_hour} restarts within an hour use up resilience.max_restarts_per_hour",
    ),
    Row(
        lambda s: s.fault.kind == "node_lost",
        "replace_node",
        lambda s: f"node {', '.join(map(str, s.fault.nodes))} is gone: its agent is started anew",
    ),
    Row(
        lambda s: s.fault.kind == "straggler",
        "replace_node",
        lambda s: f"node {', '.join(map(str, s.fault.nodes))} slows the others down (resilience.straggler: replace)",
    ),
    Row(
        lambda s: True,
        "restart_workers",
        lambda s: "all ranks start again from the newest checkpoint",
    ),
)


def decide(situation: Situation) -> Action:
    """The action of the first row that applies."""
    row = next(row for row in TABLE if row.applies(situation))
    return Action(row.action, row.reason(situation))


def _place(fault: Fault) -> str:
    return "start-up" if fault.step is None else f"step {fault.step}"


def ordinal(count: int) -> str:
    """1 as first, and so on."""
    return {1: "first", 2: "second", 3: "third"}.get(count, f"{count}th")
