"""An agent that has lost its driver, and what it does about the job. Slurm's commands are real processes."""

import signal
from collections.abc import Iterator

import pytest

from resilient.lifeline import STOP_SIGNALS
from resilient.slurm import headless
from resilient.slurm.headless import see_to_the_job

JOB = {"id": "7", "name": "x", "state": "RUNNING", "end": "2099-01-01T00:00:00"}
IN_JOB = {"SLURM_JOB_ID": "7"}


@pytest.fixture(autouse=True)
def _signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(headless, "POLL_S", 0.01)
    before = {sig: signal.getsignal(sig) for sig in STOP_SIGNALS}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


@pytest.mark.parametrize(("requeue", "state"), [("1", "PENDING"), ("0", "CANCELLED")])
def test_a_job_that_has_lost_its_batch_host_is_requeued_or_else_cancelled(slurm, requeue: str, state: str):
    slurm.set([{**JOB, "nodes": "n[2-3]", "requeue": requeue}])
    see_to_the_job(IN_JOB, 60.0)
    assert [job["state"] for job in slurm.jobs()] == [state]


def test_a_job_that_has_its_batch_host_is_left_alone_after_a_while(slurm):
    slurm.set([{**JOB, "nodes": "n[1-2]", "requeue": "1"}])
    see_to_the_job(IN_JOB, 0.5)
    assert [job["state"] for job in slurm.jobs()] == ["RUNNING"]


def test_nothing_is_asked_outside_of_slurm(slurm):
    slurm.deaf(1)
    see_to_the_job({})
    assert (slurm.directory / "deaf").read_text() == "1"
