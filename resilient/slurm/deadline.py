"""When a job must stop by itself, and until when a stop may take. Pure.

The end of the job's time, as Slurm tells it, decides; signals are hints. Slurm looks for signals that are due every half a minute
and sends them up to a minute early, so that the one ahead of the limit says no more than that it is near.
"""

from dataclasses import dataclass
from typing import Literal

from resilient.slurm.queue import ALIVE, QueuedJob

END_S = 5.0  # between the end of a drain and that of the job: agents, steps and the driver end
MARGIN_S = 5.0  # of a drain, for what is neither a step nor a copy nor a flush
EARLY_S = 90.0  # how much earlier than asked Slurm may send the signal ahead of the limit
KILL_WAIT_S = 30.0  # from SIGTERM to SIGKILL, where the site does not say
JOB_OVER = "slurm_job_over"  # a stop, because Slurm says so of the job of this process
JOBS_TIME = "of the job's time"  # what is left, for a person
LEAD_SHARE = 0.25  # a lead that was not asked for takes no more of a job's time


@dataclass(frozen=True)
class Stop:
    """Drain now.

    Attributes:
        name: what the stop is told as: a signal, or the kind.
        kind: of the fault, where it is one; None for a stop on request.
        until_t: when the drain must be over, unix seconds; None: whatever the config says.
    """

    name: str
    kind: Literal["preempted", "time_limit"] | None
    until_t: float | None
    detail: str = ""


@dataclass(frozen=True)
class Known:
    """What bears on the question.

    Attributes:
        end_t: of the job's time, as it was when the job still had some; unix seconds, None: unknown, or no limit.
        job: what Slurm says now; None if it does not answer.
        needed_s: of a drain, from the question to its end.
        lead_s: how long before the limit the signal was asked for.
        until: what ends at `end_t`, for a person.
    """

    end_t: float | None
    job: QueuedJob | None
    needed_s: float
    lead_s: float
    kill_wait_s: float = KILL_WAIT_S
    until: str = JOBS_TIME


def needed_s(measured_s: float | None, *, lead_s: float, asked: bool) -> float:
    """How long before the end of the job a drain must begin.

    Args:
        measured_s: a step, the copy of the state, and its flush, as they were last; None: not known yet.
        lead_s: that the config allows for, or what is allowed for without it.
        asked: the config says so, and no drain may begin earlier.
    """
    if measured_s is None:
        return lead_s
    wanted = 2 * measured_s + MARGIN_S + END_S
    return min(wanted, lead_s) if asked else wanted


def lead_s(asked_s: float | None, *, drain_s: float, time_s: float | None) -> float:
    """How long before the end of a job its driver wants to hear of it, seconds.

    Args:
        asked_s: in the config.
        drain_s: that a stop may take.
        time_s: the job's whole time, if it is known.
    """
    if asked_s is not None:
        return asked_s
    wanted = 2 * drain_s + MARGIN_S + END_S
    return wanted if time_s is None else min(wanted, max(MARGIN_S + END_S, LEAD_SHARE * time_s))


def due(known: Known, now: float) -> Stop | None:
    """Whether the time that is left is what a drain needs."""
    if known.end_t is None or known.end_t - now > known.needed_s:
        return None
    left_s = max(0.0, known.end_t - now)
    return Stop("time_limit", "time_limit", _ahead_of(known.end_t, now), f"{left_s:.0f} s are left {known.until}")


def signalled(name: str, known: Known, now: float) -> Stop | None:
    """What a signal comes to; None: to nothing yet, the job's end is known and there is time."""
    job, end_t = known.job, known.end_t
    if job is not None and job.preempted:
        until = job.end_t if job.end_t is not None and job.end_t > now else now + known.kill_wait_s
        return Stop("preempted", "preempted", _ahead_of(until, now), f"Slurm wants the nodes back in {until - now:.0f} s")
    limit = due(known, now)
    if name == "SIGUSR1":
        if limit is not None:
            return limit
        near = end_t is not None and end_t - now <= known.lead_s + EARLY_S
        return None if near else Stop(name, None, _end(end_t))
    killed_t = now + known.kill_wait_s
    if end_t is not None and now >= end_t - MARGIN_S:
        return Stop("time_limit", "time_limit", _ahead_of(killed_t, now), "the job's time is over")
    if job is None or job.state not in ALIVE:  # cancelled, or nobody says that it is not
        return Stop(name, None, _ahead_of(killed_t, now))
    return limit or Stop(name, None, _end(end_t))


def called_over(state: str, kill_wait_s: float, now: float) -> Stop:
    """What it comes to that Slurm calls the job over in which this process runs: nobody grants it any time.

    Args:
        state: of the job, in Slurm's words; empty where Slurm does not know it any more.
    """
    how = f"calls this job over ({state})" if state else "does not know this job any more"
    return Stop(JOB_OVER, None, _ahead_of(now + kill_wait_s, now), f"Slurm {how}, and its processes still run")


def _ahead_of(killed_t: float, now: float) -> float:
    """When a drain must be over ahead of the end of all processes: what follows gets half of the time that is left at most."""
    return killed_t - min(END_S, max(0.0, killed_t - now) / 2)


def _end(end_t: float | None) -> float | None:
    return None if end_t is None else end_t - END_S
