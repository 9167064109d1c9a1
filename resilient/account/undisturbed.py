"""A stretch of steps in which nothing else happens, which is what most of a campaign consists of. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from resilient.account.timeline import seconds_of
from resilient.entries import StepEvent, StepMetrics

if TYPE_CHECKING:
    from resilient.account.accounting import Accounting

NOTES = 128  # steps after which it is still known how long ranks stood still
_PARTS = ("snapshot", "evaluation", "idle", "data", "productive", "rework")


class Note(msgspec.Struct, gc=False):
    """What is known of the time after a step. Attributes: ranks: that stood still; None: how many is not known yet."""

    stall_s: float = 0.0
    evaluated: bool = False
    gap_s: float = 0.0
    ranks: int | None = None

    @property
    def snapshot_s(self) -> float:
        return min(self.stall_s, self.gap_s)

    @property
    def rest(self) -> str:
        return "evaluation" if self.evaluated else "idle"

    @property
    def idle_s(self) -> float:
        return 0.0 if self.evaluated else self.gap_s - self.snapshot_s


def noted(notes: dict[tuple[int, int], Note], step: tuple[int, int]) -> Note:
    """The note of a step, by generation and step; a new one replaces the oldest."""
    note = notes.get(step)
    if note is None:
        note = notes[step] = Note()
        if len(notes) > NOTES:
            del notes[next(iter(notes))]
    return note


def undisturbed(
    accounting: "Accounting", metrics: Sequence[StepMetrics], at: int, events: Sequence[StepEvent], event_at: int
) -> tuple[int, int]:
    """Take steps, each with what is told of it before the next one ends; up to anything else.

    To the last bit it does what the accounting does line by line, with the state in local variables.

    Args:
        accounting: between two steps, and no fault is open.
        at, event_at: the next of each.

    Returns:
        The next of each.
    """
    assert accounting.cursor is not None
    assert accounting.before is not None
    cursor, wall_s, before, done, step_s, idle_s = (
        accounting.cursor,
        accounting.kept.wall_s,
        accounting.before,
        accounting.done,
        accounting.step_s,
        accounting.idle_s,
    )
    snapshot, evaluation, idle, data, productive, rework = (accounting.span.get(part, 0.0) for part in _PARTS)
    run, notes, ranks = (
        accounting.kept.runs[-1] if accounting.kept.runs else None,
        accounting.notes,
        accounting.ranks if accounting.known else None,
    )
    generation, killed = 0 if run is None else run.generation, accounting.killed
    last, note = len(events), None
    for metric in metrics[at:] if at else metrics:
        t = metric.t
        while event_at < last and (event := events[event_at]).t < t:
            if event.event == "snapshot":
                if (event.generation, event.step) != before or event.count > 1:
                    break
                note = note or noted(notes, before)
                stall_s = event.stall_s
                if note.gap_s or stall_s is None:  # of a step that was told twice
                    break
                if stall_s > note.stall_s:
                    note.stall_s = stall_s
            event_at += 1
        else:
            if killed is not None and metric.generation <= killed.generation:
                break
            at += 1
            if metric.step is UNSET or metric.step_s is None or metric.generation < generation:
                continue
            step_s = metric.step_s if metric.steps == 1 else seconds_of(metric.step_s, metric.steps)
            began = t - step_s
            if began < cursor:
                began = cursor
            if note is None:
                note = notes.get(before) or noted(notes, before)
            note.gap_s = gap_s = began - cursor
            note.ranks = ranks
            if gap_s:
                stood_s = note.stall_s if note.stall_s < gap_s else gap_s
                seconds = cursor + stood_s - cursor
                if seconds > 0:
                    cursor, wall_s, snapshot = cursor + seconds, wall_s + seconds, snapshot + seconds
                seconds = began - cursor
                if note.evaluated:
                    if seconds > 0:
                        cursor, wall_s, evaluation = cursor + seconds, wall_s + seconds, evaluation + seconds
                else:
                    idle_s += gap_s - stood_s
                    if seconds > 0:
                        cursor, wall_s, idle = cursor + seconds, wall_s + seconds, idle + seconds
            until = began + (metric.data_s or 0.0)
            seconds = (until if until < t else t) - cursor
            if seconds > 0:
                cursor, wall_s, data = cursor + seconds, wall_s + seconds, data + seconds
            seconds = t - cursor
            is_new = metric.step > done
            if seconds > 0:
                cursor, wall_s = cursor + seconds, wall_s + seconds
                if is_new:
                    productive += seconds
                else:
                    rework += seconds
            if is_new:
                done = metric.step
            before, note = (metric.generation, metric.step), None
            continue
        break
    accounting.cursor, accounting.kept.wall_s, accounting.before, accounting.done, accounting.step_s, accounting.idle_s = (
        cursor,
        wall_s,
        before,
        done,
        step_s,
        idle_s,
    )
    for part, seconds in zip(_PARTS, (snapshot, evaluation, idle, data, productive, rework), strict=True):
        if seconds:
            accounting.span[part] = seconds
    if run is not None:
        run.until_t, run.step = max(run.until_t, cursor), before[1]
    return at, event_at
