"""A job that has stopped: whether it begins again, and asks Slurm for that. Slurm's commands are real processes."""

import asyncio
import os
from typing import Any

import pytest

from resilient.slurm.requeued import Requeue, ask_for, requeue_of

PREEMPTED = {"preempt": "2026-11-28T10:00:00", "requeue": "1"}
IN_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": str(os.getpid())}  # as `exec` leaves it


def asked(slurm: Any, job: dict[str, str], environ: dict[str, str]) -> Requeue | None:
    slurm.set([{"id": "7", "name": "x", "state": "RUNNING", "end": "2026-11-28T10:00:30", **job}])
    return asyncio.run(requeue_of({**IN_SCRIPT, **environ}))


def test_a_job_that_is_preempted_and_may_be_requeued_begins_again(slurm):
    requeue = asked(slurm, PREEMPTED, {})
    assert requeue == Requeue("7", asked=False)
    asyncio.run(ask_for(requeue))
    assert [job["state"] for job in slurm.jobs()] == ["PENDING"]


@pytest.mark.parametrize(
    ("kind", "cluster", "partition", "qos", "again"),
    [
        ("preempt/partition_prio", "REQUEUE", "CANCEL", "cluster", False),
        ("preempt/partition_prio", "CANCEL", "REQUEUE", "cluster", True),
        ("preempt/partition_prio", "GANG,CANCEL", "GANG,CANCEL", "cluster", False),
        ("preempt/qos", "CANCEL", "REQUEUE", "cluster", False),
        ("preempt/qos", "REQUEUE", "REQUEUE", "cancel", False),
        ("preempt/qos", "CANCEL", "CANCEL", "requeue", True),
        ("preempt/none", "CANCEL", "REQUEUE", "cluster", False),
    ],
)
def test_a_job_that_slurm_cancels_for_another_one_does_not_ask_to_begin_again(slurm, kind, cluster, partition, qos, again: bool):
    slurm.preempts(kind, cluster, partition, qos)
    assert (asked(slurm, PREEMPTED, {}) is not None) is again


@pytest.mark.parametrize("count", [{}, {"SLURM_RESTART_COUNT": "2"}], ids=["for the first time", "again"])
def test_a_job_that_slurm_has_requeued_is_known_and_needs_not_ask(slurm, count: dict[str, str]):
    restarts = str(1 + int(count.get("SLURM_RESTART_COUNT", "0")))
    requeue = asked(slurm, {"state": "COMPLETING", "requeue": "1", "restarts": restarts}, {**count, "SLURM_TASK_PID": "1"})
    assert requeue == Requeue("7", asked=True)
    asyncio.run(ask_for(requeue))
    assert [job["state"] for job in slurm.jobs()] == ["COMPLETING"]


@pytest.mark.parametrize(
    ("job", "environ"),
    [
        ({"requeue": "1"}, {}),
        ({**PREEMPTED, "requeue": "0"}, {}),
        ({"requeue": "1", "restarts": "2"}, {"SLURM_RESTART_COUNT": "2"}),
        (PREEMPTED, {"SLURM_TASK_PID": "1"}),
        (PREEMPTED, {"SLURM_STEP_ID": "0"}),
    ],
    ids=["not preempted", "not to be requeued", "requeued before", "more may follow in the script", "behind srun"],
)
def test_no_other_job_does(slurm, job, environ):
    assert asked(slurm, job, environ) is None


def test_a_slurm_that_does_not_answer_or_refuses_is_put_up_with(slurm, caplog: pytest.LogCaptureFixture):
    slurm.deaf(2)
    assert asked(slurm, PREEMPTED, {}) is None
    asyncio.run(ask_for(Requeue("7", asked=False)))
    assert "job 7 is not put back into the queue: scontrol: slurm_load_jobs error" in caplog.text
