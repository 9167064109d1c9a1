"""A job that has stopped, and goes back into the queue itself: Slurm has requeued it, or it asks for that.

Slurm requeues a job that it has had to end. One that is preempted and ends by itself within its grace time is over for Slurm,
whatever its exit code says. So where it may be requeued it asks for that itself, as the last thing that it does; but not where the
site has jobs that are preempted cancelled (PreemptMode).
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from resilient.slurm import queue
from resilient.slurm.allocation import own_job
from resilient.slurm.queue import SlurmSilent

log = logging.getLogger(__name__)

ASK_S = 5.0


@dataclass(frozen=True)
class Requeue:
    """Of a job. Attributes: asked: Slurm has it requeued already; else it has to be told to."""

    job_id: str
    asked: bool


async def requeue_of(environ: Mapping[str, str]) -> Requeue | None:
    """Whether the job of this process, which has stopped, is to begin again.

    It asks for that only where this process is the batch script (by `exec`): what follows a command may submit a job by itself.
    """
    job_id, began = own_job(environ), environ.get("SLURM_RESTART_COUNT", "0")
    try:
        allotted = await queue.allotted(job_id, timeout_s=ASK_S)
        if allotted is None:
            return None
        if began.isdecimal() and allotted.restarts > int(began):
            return Requeue(job_id, asked=True)
        batch = environ.get("SLURM_TASK_PID") == str(os.getpid()) and "SLURM_STEP_ID" not in environ
        if not (batch and allotted.requeue and allotted.runs):
            return None
        found = await queue.job(job_id, timeout_s=ASK_S)
        if found is None or not (found.runs and found.preempted):
            return None
        cancelled = "CANCEL" in (await queue.preempt_mode(allotted, timeout_s=ASK_S)).split(",")
    except SlurmSilent as error:
        log.warning("whether the job is requeued: %s", error)
        return None
    if cancelled:
        log.info("job %s is not requeued: Slurm cancels jobs that it preempts here (PreemptMode)", job_id)
    return None if cancelled else Requeue(job_id, asked=False)


async def ask_for(requeue: Requeue) -> None:
    """Have the job begin again, unless it will; Slurm signals this process for it."""
    if requeue.asked:
        return
    try:
        await queue.requeue(requeue.job_id)
    except SlurmSilent as error:
        log.warning("job %s is not put back into the queue: %s", requeue.job_id, error)
