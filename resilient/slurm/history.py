"""The jobs of a chain as a person wants to see them, from its records and the queue. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.slurm.queue import QueuedJob

WAITS, RUNS, SILENT = "waiting", "running", "ended without a word"


@dataclass
class JobLine:
    """A job of the chain; times in unix seconds.

    Attributes:
        state: running, waiting, cancelled, ended by an exit code, or without a word.
        step: that it began at.
        until_t: the end of its time, while it runs.
        reason: why it waits, in Slurm's words.
    """

    job: str
    state: str
    submitted_t: float | None = None
    started_t: float | None = None
    ended_t: float | None = None
    step: int | None = None
    exit_code: int | None = None
    until_t: float | None = None
    reason: str = ""


def history(records: Iterable[Mapping[str, Any]], queue: Sequence[QueuedJob] | None) -> list[JobLine]:
    """All jobs of a campaign, in the order in which they were submitted.

    Args:
        queue: None: Slurm does not say.
    """
    lines: dict[str, JobLine] = {}

    def line(job: str) -> JobLine:
        return lines.setdefault(job, JobLine(job, WAITS))

    for record in records:
        match record.get("what"):
            case "submitted":
                line(record["job"]).submitted_t = record["t"]
            case "started":
                found = line(record["job"])
                found.state, found.started_t, found.step = RUNS, record["t"], record["step"]
                found.ended_t = found.exit_code = None  # it may have been requeued
            case "ended":
                found = line(record["job"])
                found.state, found.ended_t, found.exit_code = f"ended by {record['exit_code']}", record["t"], record["exit_code"]
            case "cancelled":
                line(record["job"]).state = "cancelled"
    there = {job.job_id: job for job in queue or ()}
    for job_id, job in there.items():
        found = line(job_id)
        if job.waits:
            found.state, found.reason = WAITS, job.reason
        elif job.runs:
            found.until_t = job.end_t
    if queue is not None:
        for found in lines.values():
            if found.job not in there and found.state in (WAITS, RUNS):
                found.state = SILENT
    return list(lines.values())


def began_t(records: Iterable[Mapping[str, Any]]) -> float | None:
    """When the campaign was submitted for the first time, unix seconds."""
    return next((float(record["t"]) for record in records if record.get("what") == "begun"), None)


def queued_s(lines: Sequence[JobLine], first_t: float, ran_s: float, now: float) -> float:
    """How long no job computed, from the campaign's first submission until now, or until nothing of it is left.

    Args:
        ran_s: for how long jobs did.
    """
    if any(line.state in (WAITS, RUNS) for line in lines):
        until_t = now
    else:
        until_t = max((line.ended_t or line.started_t or first_t for line in lines), default=first_t)
    return max(0.0, until_t - first_t - ran_s)
