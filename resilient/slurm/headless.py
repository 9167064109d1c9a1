"""A job that has lost its batch host, and with it its driver.

Where it was submitted with `--no-kill`, Slurm takes the node out of the job and lets the rest stand until the time limit, although
nobody is left that could use it, and the next job of the chain waits behind it. So an agent that does not hear its driver any more
asks Slurm how the job is, and has it requeued, or cancelled where that is not allowed. Slurm's word alone counts: the driver may be
well, and goes on without that agent.

A driver whose connection is closed without a word was killed. With its batch host in the job that is the end of the job; but Slurm
kills it, too, when a slurmd that was away for too long is back on the batch host, and the job has lost that node.
"""

import asyncio
import logging
import math
import signal
import time
from collections.abc import Mapping

from resilient.lifeline import STOP_SIGNALS
from resilient.slurm import queue
from resilient.slurm.allocation import JOB, own_job
from resilient.slurm.queue import SlurmSilent

log = logging.getLogger(__name__)

POLL_S = 10.0  # Slurm itself takes minutes until it calls a node down
CLOSED_S = 60.0  # Slurm has lost the node already where it kills what is there


def see_to_the_job(environ: Mapping[str, str], within_s: float = math.inf) -> None:
    """Wait until the job is over, or has lost its batch host and is ended for that. Outside of Slurm there is nothing to do.

    Args:
        within_s: no longer than that.
    """
    if JOB in environ:
        for sig in STOP_SIGNALS:  # a driver that lives after all ends the step
            signal.signal(sig, signal.SIG_DFL)
        asyncio.run(_watch(own_job(environ), time.monotonic() + within_s))


async def _watch(job_id: str, until_s: float) -> None:
    while time.monotonic() < until_s:
        try:
            found = await queue.allotted(job_id)
            if found is None or not found.runs:
                return
            if found.headless:
                log.warning("Slurm has lost %s, the batch host of job %s; the job ends", found.batch_host, job_id)
                await (queue.requeue if found.requeue else queue.cancel)(job_id)
                return
        except SlurmSilent as error:
            log.warning("how job %s is: %s", job_id, error)
        await asyncio.sleep(POLL_S)
