"""The last steps of a job whose driver was killed, which its nodes tell the next driver of. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.account.timeline import TimelineEntry

if TYPE_CHECKING:
    from resilient.account.accounting import Accounting


@dataclass
class KilledJob:
    """The job before the present one, where it ended without a word.

    Attributes:
        generation: its last.
        until_t: unix seconds, up to which its time has a name.
        phase: the part that what follows belongs to, "run" between steps.
        ranks: that it had.
        done: the last step that it had finished, as far as was known.
        kept: the last step that the next job did not compute again; None: not known yet.
    """

    generation: int
    until_t: float
    phase: str
    ranks: int
    done: int
    kept: int | None = None


def killed_job(accounting: "Accounting") -> KilledJob | None:
    """The job that another one follows now; None: it ended by itself, during a restart, or before it had started a rank."""
    runs = accounting.kept.runs
    if accounting.cursor is None or accounting.phase in ("restart", "finish"):
        return None
    if not accounting.known or not runs:
        return None
    return KilledJob(runs[-1].generation, accounting.cursor, accounting.phase, accounting.ranks, accounting.done)


def late_step(accounting: "Accounting", killed: KilledJob, line: TimelineEntry) -> None:
    """Credit a step to the killed job; one that ended after the present job began is left out."""
    kept = accounting.kept
    if not kept.runs or line.t > kept.runs[-1].t:
        return
    before, began = "idle" if killed.phase == "run" else killed.phase, line.t - line.seconds
    again = line.step <= killed.done or (killed.kept is not None and killed.kept < line.step <= accounting.done)
    computed = "rework" if again else "productive"
    for part, until_t in ((before, began), ("data", min(line.t, began + line.data_s)), (computed, line.t)):
        seconds = until_t - killed.until_t
        if seconds > 0:
            killed.until_t += seconds
            kept.wall_s += seconds
            kept.seconds[part] += seconds * killed.ranks
            for run in kept.runs[-2:-1]:
                run.seconds[part] = run.seconds.get(part, 0.0) + seconds
                run.until_t, run.step = max(run.until_t, killed.until_t), line.step
    killed.phase, killed.done = "run", max(killed.done, line.step)
    accounting.done = max(accounting.done, line.step)
