"""The recovery ladder: what to do about a fault, and when.

Pure: (fault, history, budget, clock) to an action, by the first row of a table that holds. It sees no process and does nothing.

What counts against a failure is the *stretch* of faults without progress that it belongs to: those since a step was last finished
at which an earlier one had failed, or since an attempt of a script that says nothing got on (`resilient.recovery.attempts`).
Restarts within a stretch follow each other with growing pauses; progress forgets them. Faults count by the attempts that they have
ended (`resilient.recovery.history`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from resilient.recovery.faults import Fault, listed
from resilient.recovery.history import History
from resilient.recovery.rollback import RollBack, bad_numbers, choose, data_of

ActionName = Literal[
    "wait",
    "report",
    "degrade",
    "restart_agent",
    "restart_workers",
    "replace_node",
    "exclude_node",
    "roll_back",
    "finish_drain",
    "give_up",
]

FLAPS = 3  # losses of one node within an hour, at the least, before it is left for them
FIRST_PAUSE_S = 0.5
HOUR_S = 3600.0
PATIENCE = 2  # times as many failures that differ are put up with at one step as failures that are the same


@dataclass(frozen=True)
class Action:
    """What is done, and why in a sentence.

    Attributes:
        delay_s: for how long the next generation is held back.
        roll_back: where to, and what is left out.
        leave: why the nodes of the fault are left until somebody says that they may be used again; empty where they are not.
    """

    name: ActionName
    reason: str
    delay_s: float = 0.0
    roll_back: RollBack | None = None
    leave: str = ""


@dataclass(frozen=True)
class Budget:
    """How much trouble is put up with.

    `backoff_s` is the longest pause before a restart; files that are missing or unreadable are waited for up to `files_patience_s`.
    """

    max_restarts_per_hour: int
    give_up_after_same_step: int
    backoff_s: float = 30.0
    max_roll_backs: int = 3
    files_patience_s: float = 300.0


@dataclass(frozen=True)
class Situation:
    """Everything that a decision may depend on.

    Attributes:
        fault: the one to decide on; `files` only of files that may be waited for.
        earlier: those of this job, without `fault`.
        draining: a stop was asked for.
        now: unix seconds.
        outage: what a link of the group does or did a moment ago; None where all are well.
        link_grace_s: how long a stall may last before a link is no excuse any more.
        stand_in: what becomes of the place of a node that is gone, in words.
        roll_backs: of this job, each with its fault, oldest first.
        checkpoints: the steps that can be gone on from.
        beginning: so can the start of the run.
        replace_stragglers: the node of a straggler is replaced, once; else it is only told.
        dispensable: the others can go on at once without the nodes of the fault.
        left: nodes without which the others go on: that they were lost counts no more.
    """

    fault: Fault
    earlier: History
    budget: Budget
    draining: bool
    now: float
    outage: str | None = None
    link_grace_s: float = 0.0
    stand_in: str = ""
    roll_backs: Sequence[tuple[Fault, RollBack]] = ()
    checkpoints: Sequence[int] = ()
    beginning: bool = False
    replace_stragglers: bool = False
    dispensable: bool = False
    left: frozenset[int] = frozenset()

    @cached_property
    def _begin(self) -> int:
        return self.earlier.begin(self.fault)

    @property
    def stretch(self) -> list[Fault]:
        """The faults without progress between them, up to this one."""
        return [*(fault for _, fault in self.earlier.since(self._begin)), self.fault]

    @cached_property
    def failures(self) -> int:
        """How many attempts they have ended."""
        return self.earlier.failures(self.fault, self._begin)

    @cached_property
    def files_waited_s(self) -> float:
        """For how long files have been missing or unreadable, without progress since."""
        times = [t for t, fault in self.earlier.since(self._begin) if fault.files is not None]
        return self.now - min(times, default=self.now)

    @property
    def waits_for_files(self) -> bool:
        """Whether files are waited for."""
        return self.fault.files is not None and self.files_waited_s < self.budget.files_patience_s

    def _counts(self, fault: Fault) -> bool:
        """Whether an earlier fault counts against this one: what was waited for does only once the patience is over."""
        if fault.kind == "node_lost" and fault.nodes and self.left.issuperset(fault.nodes):
            return False
        return fault.files is None or self.fault.files is not None

    @cached_property
    def same(self) -> int:
        """How many attempts this very failure has ended without progress, this time included."""
        return self.earlier.same(self.fault, self._begin)

    @cached_property
    def at_this_step(self) -> int:
        """How many attempts were ended at the same step without progress, this one included."""
        return self.earlier.at_step(self.fault, self._begin, self.left, self._counts)

    @property
    def ways(self) -> str:
        """How often each failure has ended an attempt at the same step without progress, and where."""
        faults = [fault for fault in self.stretch if fault.step == self.fault.step and self._counts(fault)]
        return _ways(attempts(faults))

    @property
    def bad_numbers(self) -> bool:
        """Whether the state is in doubt, and not who computes it."""
        return bad_numbers(self.fault)

    @property
    def in_vain(self) -> list[tuple[Fault, RollBack]]:
        """The roll-backs that have brought no progress."""
        which = {fault.fault_id for fault in self.stretch}
        return [each for each in self.roll_backs if each[0].fault_id in which]

    @cached_property
    def way_back(self) -> RollBack | None:
        """Where a roll-back would lead."""
        return choose(self.fault, self.in_vain, self.checkpoints, beginning=self.beginning)

    @cached_property
    def in_last_hour(self) -> int:
        """How many attempts before this one were ended less than an hour ago."""
        return self.earlier.after(self.now - HOUR_S, self.fault, self.left, self._counts)

    @cached_property
    def lost_alone(self) -> int:
        """How many attempts of the last hour the node of this fault has ended by being lost, and no other with it, this time
        included; 0 of a fault that is no loss, or that other nodes have had a part in."""
        return self.earlier.lost_alone(self.now - HOUR_S, self.fault)

    @property
    def flaps(self) -> bool:
        """Whether the node of this fault is not needed, and has used half of the restarts up, or would end the run by itself."""
        often = self.lost_alone >= max(FLAPS, -(-self.budget.max_restarts_per_hour // 2))
        in_vain = min(self.lost_alone, self.same) >= self.budget.give_up_after_same_step
        return self.dispensable and (often or in_vain)

    @property
    def worth_replacing(self) -> bool:
        """Whether the node of a straggler is to be replaced: not for a second time, nor for the last of the restarts."""
        before = any(fault.kind == "straggler" and fault.nodes == self.fault.nodes for _, fault in self.earlier)
        return self.replace_stragglers and not before and self.in_last_hour + 1 < self.budget.max_restarts_per_hour


@dataclass(frozen=True)
class Row:
    """One step of the ladder: when it applies, what is done, and why."""

    applies: Callable[[Situation], bool]
    action: ActionName
    reason: Callable[[Situation], str]


STALLED = ("collective_timeout", "link_down")
"""Kinds of stalls that a link may explain."""

UNFIT = "not fit"
"""The cause of a fault in which a node has failed its health check."""

ILL = "ill"
"""That of one in which a device of a node is not to be used any more, and its ranks have not failed yet."""

TABLE: tuple[Row, ...] = (
    Row(
        lambda s: s.fault.kind == "storage",
        "degrade",
        lambda s: "training and snapshots go on; what is to be written waits",
    ),
    Row(
        lambda s: s.fault.cause == UNFIT,
        "exclude_node",
        lambda s: "it takes no part until its agent is started anew",
    ),
    Row(
        lambda s: s.fault.cause == ILL,
        "exclude_node",
        lambda s: "it is left at a step boundary as soon as the others can go on without it",
    ),
    Row(
        lambda s: s.fault.kind == "node_lost" and not s.fault.ranks,
        "restart_agent",
        lambda s: "no rank ran there: its agent is started anew",
    ),
    Row(
        lambda s: s.draining,
        "finish_drain",
        lambda s: (
            "a stop was asked for: the newest checkpoint is the state"
            + (f"; {_since(s.fault)}: {_way_back(s.way_back)}" if s.bad_numbers and s.way_back is not None else "")
        ),
    ),
    Row(
        lambda s: s.fault.kind in STALLED and s.outage is not None and s.fault.detect_s < s.link_grace_s,
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
        lambda s: s.waits_for_files,
        "restart_workers",
        lambda s: f"{s.fault.files} is missing or unreadable, and is waited for, up to {s.budget.files_patience_s:g} s",
    ),
    Row(
        lambda s: s.flaps,
        "replace_node",
        lambda s: f"node {listed(s.fault.nodes)} {_often(s)}: it is left, and the others go on without it",
    ),
    Row(
        lambda s: s.in_last_hour >= s.budget.max_restarts_per_hour,
        "give_up",
        lambda s: f"{s.in_last_hour} restarts within an hour use up resilience.max_restarts_per_hour",
    ),
    Row(
        lambda s: s.bad_numbers and len(s.in_vain) >= s.budget.max_roll_backs,
        "give_up",
        lambda s: f"{_since(s.fault)}, although the run was rolled back to {_targets(s.in_vain)}",
    ),
    Row(
        lambda s: s.bad_numbers and s.way_back is None,
        "give_up",
        lambda s: f"{_since(s.fault)}, and no checkpoint from before is left: the oldest is of step {min(s.checkpoints)}",
    ),
    Row(
        lambda s: s.bad_numbers,
        "roll_back",
        lambda s: f"{_since(s.fault)}: {_way_back(s.way_back)}",
    ),
    Row(
        lambda s: s.same >= s.budget.give_up_after_same_step,
        "give_up",
        lambda s: f"the same failure ({s.fault.detail}) at {_place(s.fault)} for the {ordinal(s.same)} time: no attempt passed it",
    ),
    Row(
        lambda s: s.at_this_step >= PATIENCE * s.budget.give_up_after_same_step,
        "give_up",
        lambda s: f"{s.at_this_step} attempts ended at {_place(s.fault)}, if not in the same way: {s.ways}",
    ),
    Row(
        lambda s: s.fault.kind == "node_lost",
        "replace_node",
        lambda s: f"node {listed(s.fault.nodes)} is gone: {s.stand_in}",
    ),
    Row(
        lambda s: s.fault.kind == "straggler",
        "replace_node",
        lambda s: f"node {listed(s.fault.nodes)} slows the others down (resilience.straggler: replace)",
    ),
    Row(
        lambda s: True,
        "restart_workers",
        lambda s: "all ranks start again from the newest checkpoint" + (" of the script" if s.fault.attempt is not None else ""),
    ),
)


_RESTARTS = frozenset({"restart_workers", "replace_node", "roll_back"})


def decide(situation: Situation) -> Action:
    """The action of the first row that applies."""
    row = next(row for row in TABLE if row.applies(situation))
    rolls_back = row.action == "roll_back" or (row.action == "finish_drain" and situation.bad_numbers)
    action = Action(row.action, row.reason(situation), roll_back=situation.way_back if rolls_back else None)
    if action.name == "replace_node" and situation.flaps:
        action = replace(action, leave=f"it {_often(situation)}")
    delay_s = pause_s(situation.failures, situation.budget.backoff_s) if row.action in _RESTARTS else 0.0
    if situation.waits_for_files:  # the last attempt is made when the patience is over
        delay_s = min(delay_s, situation.budget.files_patience_s - situation.files_waited_s)
    if not delay_s:
        return action
    why = f"{action.reason}, in {delay_s:g} s: {situation.failures} failures without progress"
    return replace(action, reason=why, delay_s=delay_s)


def pause_s(failures: int, longest_s: float) -> float:
    """How long to wait after so many failures without progress: not at all after the first, then twice as long each time."""
    return min(longest_s, FIRST_PAUSE_S * 2.0 ** min(failures - 2, 30)) if failures > 1 else 0.0


def attempts(faults: Sequence[Fault]) -> list[Fault]:
    """Of each attempt that these faults have ended, the first; one whose generation is not known is an attempt of its own."""
    found: dict[int | tuple[int], Fault] = {}
    for number, fault in enumerate(faults):
        found.setdefault((number,) if fault.generation is None else fault.generation, fault)
    return list(found.values())


def _ways(faults: Sequence[Fault]) -> str:
    """How often each failure happened, and where."""
    counted: dict[str, list[Fault]] = {}
    for fault in faults:
        counted.setdefault(fault.detail, []).append(fault)

    def way(detail: str, which: Sequence[Fault]) -> str:
        ranks = sorted({rank for fault in which for rank in fault.ranks})
        who = f" (rank {listed(ranks)})" if ranks else ""
        return f"{detail}{who}" + (f", {len(which)} times" if len(which) > 1 else "")

    return "; ".join(way(detail, which) for detail, which in counted.items())


def _often(situation: Situation) -> str:
    return f"was lost {situation.lost_alone} times within an hour"


def _since(fault: Fault) -> str:
    return f"{fault.detail}: bad since step {data_of(fault)[0]}"


def _targets(roll_backs: Sequence[tuple[Fault, RollBack]]) -> str:
    return ", ".join(f"step {done.step}" for _, done in roll_backs)


def _way_back(way: RollBack | None) -> str:
    assert way is not None
    detail = f"back to step {way.step}, and what is newer is invalidated"
    if way.skip is None:
        return detail
    first, last = way.skip
    return (
        f"{detail}; bad again at the same data: {f'steps {first} to {last} are' if last > first else f'step {first} is'} left out"
    )


def _place(fault: Fault) -> str:
    return "start-up" if fault.step is None else f"step {fault.step}"


def ordinal(count: int) -> str:
    """1 as first, and so on."""
    return {1: "first", 2: "second", 3: "third"}.get(count, f"{count}th")
