"""Moments: when a fault strikes. Waited for as near to the target as can be, since a snapshot takes milliseconds."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from chaos.injectors.context import InjectionContext
from chaos.orchestration.tail import Tail
from resilient import entries, ledger
from resilient.heartbeat.layout import PHASES

Phase = Literal["start", "load", "data", "step", "snapshot", "eval", "flush", "recovery", "drain"]

POLL_S = 0.002
SLOW_POLL_S = 0.01  # where files are read, and not heartbeat regions alone
OF_RANKS = PHASES
OF_THE_RUN = ("flush", "recovery", "drain")


@dataclass(frozen=True)
class Moment:
    """At once; or once `step` is finished by some rank; or while the target's rank, or the run, is in `phase`; or one after the
    other."""

    step: int | None = None
    phase: Phase | None = None


class Missed(Exception):
    """The moment did not come."""


def wait_for(moment: Moment, context: InjectionContext, limit_s: float) -> None:
    """Return at the moment.

    Raises:
        Missed: it did not come within the limit, or its end was wanted before.
    """
    deadline = time.monotonic() + limit_s
    if moment.step is not None:
        wanted = moment.step
        _until(lambda: _furthest(context) >= wanted, context, deadline, POLL_S, f"step {wanted}")
    if moment.phase is not None:
        phase = moment.phase
        poll_s = POLL_S if phase in OF_RANKS else SLOW_POLL_S
        holds = _Recovery(context) if phase == "recovery" else lambda: now_in(context, phase)
        _until(holds, context, deadline, poll_s, f"phase {phase}")


def now_in(context: InjectionContext, phase: Phase) -> bool:
    """Whether the target's rank, or the run, is in this phase."""
    if phase in OF_RANKS:
        activities, rank = context.activities(), context.target.rank
        mine = activities.values() if rank is None else [activities[rank]] if rank in activities else []
        return any(activity.phase == phase for activity in mine)
    if phase == "flush":
        return any(context.config.checkpoint.tiers[-1].path.glob("step-*.tmp"))
    if phase == "drain":
        return any(activity.stopped for activity in context.activities().values())
    return _Recovery(context)()


class _Recovery:
    """Whether the run recovers from a fault, by what the ledger has got since the last call."""

    def __init__(self, context: InjectionContext) -> None:
        self._tail = Tail(context.run_dir / ledger.EVENTS)
        self._open = False

    def __call__(self) -> bool:
        for line in entries.events(self._tail.read()):
            if line["event"] in ("fault", "recovered", "run_started"):
                self._open = line["event"] == "fault"
        return self._open


def _furthest(context: InjectionContext) -> int:
    return max((activity.step for activity in context.activities().values()), default=-1)


def _until(holds: Callable[[], bool], context: InjectionContext, deadline: float, poll_s: float, what: str) -> None:
    while not holds():
        if time.monotonic() > deadline or context.over(poll_s):
            raise Missed(f"{what} did not come")
