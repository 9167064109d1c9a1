"""`resilient stop`: the end of a chain, and the word to the driver that runs, wherever it does."""

import asyncio
import os
import signal
from pathlib import Path

from resilient.driver.lease import PATIENCE_S, Owner, holder
from resilient.exits import EnvironmentUnusable
from resilient.processes import driver_pid, must_be_run_directory, out_of_reach
from resilient.slurm import queue
from resilient.slurm.queue import SlurmSilent
from resilient.slurm.succession import Succession


def halt(run_dir: Path) -> str:
    """Stop what runs in a run directory, with its state made durable, and what waits behind it; what was done, in words.

    Raises:
        EnvironmentUnusable: it is no run directory, Slurm does not answer, or the driver cannot be reached from here.
    """
    owner = holder(run_dir, PATIENCE_S)
    chain = Succession.found(run_dir)
    if chain is not None:
        try:
            running = [job.job_id for job in asyncio.run(chain.stop()) if job.runs]
        except EnvironmentUnusable as error:
            there = f"{owner} runs on" if owner is not None else "what runs was not told"
            raise EnvironmentUnusable(f"{error}; the chain ends with its next job, but {there}: call again") from error
        if running:
            for job_id in running:
                try:
                    _signal_job(job_id)
                except EnvironmentUnusable as error:
                    raise EnvironmentUnusable(f"{error}; the chain is over, but job {job_id} runs on: call again") from error
            return f"the chain is over: nothing waits, and job {', '.join(running)} stops at its next step"
        if owner is None:
            return "the chain is over: nothing waits, and nothing runs"
    if owner is None:
        must_be_run_directory(run_dir)
        return f"nothing runs in {run_dir}"
    _request_stop(run_dir, owner)
    return f"{owner} stops at its next step"


def _request_stop(run_dir: Path, owner: Owner) -> None:
    if owner.job:
        _signal_job(owner.job)
    elif (pid := driver_pid(owner)) is not None:
        try:
            os.kill(pid, signal.SIGTERM)
        except OSError as error:
            raise EnvironmentUnusable(f"{owner} cannot be told to stop: {error.strerror}") from error
    else:
        raise EnvironmentUnusable(f"{run_dir} is in use by {out_of_reach(owner)}: call `resilient stop`, or kill -TERM it, there")


def _signal_job(job_id: str) -> None:
    """SIGTERM: the signal ahead of the limit would be taken for one that Slurm has sent early."""
    try:
        asyncio.run(queue.signal_driver(job_id, "TERM"))
    except SlurmSilent as error:
        raise EnvironmentUnusable(str(error)) from error
