"""The jobs of a chain as a person wants to see them, from its records and the queue. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.slurm.chain import GOES_ON
from resilient.slurm.queue import QueuedJob

WAITS, RUNS, SILENT = "waiting", "running", "ended without a word"
NEVER = "gone before it began"  # cancelled by somebody, or ended before it had the run directory


@dataclass
class JobLine:
    """A job of the chain; times in unix seconds.

    Attributes:
        state: running, waiting, cancelled, ended by an exit code, or without a word, or gone before it began.
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
                found.state = SILENT if found.state == RUNS else NEVER
    return list(lines.values())


def queued_s(
    records: Iterable[Mapping[str, Any]], lines: Sequence[JobLine], runs: Sequence[tuple[float, float]], ran_s: float, now: float
) -> float | None:
    """How long no job computed although the campaign was submitted and its chain not over; None: it was never submitted.

    Args:
        lines: its jobs.
        runs: beginning and end of the newest, unix seconds; those that belong to no chain among them.
        ran_s: all runs together.
    """
    goes_on = any(line.state in (WAITS, RUNS) for line in lines)
    found = _stretches(records, runs, now if goes_on else None)
    if not found:
        return None
    wanted_s = sum(end - begin for begin, end in found)
    covered_s = sum(max(0.0, min(end, until_t) - max(begin, t)) for begin, end in found for t, until_t in runs)
    older_s = ran_s - sum(until_t - t for t, until_t in runs)
    return max(0.0, wanted_s - covered_s - older_s)


def _stretches(
    records: Iterable[Mapping[str, Any]], runs: Sequence[tuple[float, float]], now: float | None
) -> list[tuple[float, float]]:
    """From each submission until the chain was over, or the last job of it gone. Args: now: None: no job waits or runs."""
    found: list[tuple[float, float]] = []
    begin: float | None = None
    last_t = 0.0  # that a job of it began or ended

    def gone_t(until_t: float) -> float:
        return max([last_t, *(end for _, end in runs if last_t <= end <= until_t)])  # one that was killed has said of no end

    for record in records:
        what, t = record.get("what"), float(record["t"])
        over = what == "stopped" or (what == "ended" and record["exit_code"] not in GOES_ON)
        if begin is not None and (over or what == "begun"):
            found.append((begin, t if over else gone_t(t)))
            begin = None
        if what == "begun":
            begin = last_t = t
        elif what in ("started", "ended"):
            last_t = t
    if begin is not None:
        found.append((begin, gone_t(math.inf) if now is None else now))
    return found
