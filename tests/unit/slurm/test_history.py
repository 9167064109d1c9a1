"""What a person sees of a chain."""

import pytest

from resilient.slurm.history import JobLine, began_t, history, queued_s
from resilient.slurm.queue import QueuedJob
from resilient.status import Summary, add_chain

RECORDS = [
    {"t": 0.0, "what": "begun", "name": "x"},
    {"t": 1.0, "what": "submitted", "job": "7", "after": None},
    {"t": 100.0, "what": "started", "job": "7", "step": 0},
    {"t": 101.0, "what": "submitted", "job": "8", "after": "7"},
    {"t": 400.0, "what": "ended", "job": "7", "exit_code": 75},
    {"t": 500.0, "what": "started", "job": "8", "step": 40},
    {"t": 501.0, "what": "submitted", "job": "9", "after": "8"},
]
QUEUE = [QueuedJob("8", "RUNNING", 900.0), QueuedJob("9", "PENDING", reason="Dependency")]


def test_jobs_have_a_beginning_an_end_and_a_state():
    assert history(RECORDS, QUEUE) == [
        JobLine("7", "ended by 75", 1.0, 100.0, 400.0, 0, 75),
        JobLine("8", "running", 101.0, 500.0, None, 40, until_t=900.0),
        JobLine("9", "waiting", 501.0, reason="Dependency"),
    ]


@pytest.mark.parametrize(
    ("queue", "states"),
    [(QUEUE, ["running", "waiting"]), ([], ["ended without a word"] * 2), (None, ["running", "waiting"])],
)
def test_a_job_that_the_queue_does_not_know_has_ended_unless_nobody_answers(queue, states):
    assert [line.state for line in history(RECORDS, queue)][1:] == states


def test_a_job_that_was_requeued_waits_and_runs_again():
    again = [*RECORDS[:5], {"t": 600.0, "what": "started", "job": "7", "step": 40}]
    line = history(again, [QueuedJob("7", "RUNNING", 900.0)])[0]
    assert (line.state, line.started_t, line.ended_t, line.exit_code) == ("running", 600.0, None, None)


def test_the_time_in_the_queue_is_what_no_job_covers():
    assert began_t(RECORDS) == 0.0
    assert queued_s(history(RECORDS, QUEUE), 0.0, 400.0, 600.0) == 200.0
    assert queued_s(history(RECORDS[:2], [QueuedJob("7", "PENDING")]), 0.0, 0.0, 60.0) == 60.0
    over = [*RECORDS[:5], {"t": 401.0, "what": "cancelled", "job": "8"}]
    assert queued_s(history(over, []), 0.0, 300.0, 9000.0) == 100.0  # nothing is waited for any more


def test_the_queue_counts_in_the_goodput_and_in_the_expected_end():
    summary = Summary(goodput=0.9, wall_s=400.0, left_s=600.0)
    add_chain(summary, RECORDS, QUEUE, 600.0)
    assert summary.queued_s == 200.0
    assert summary.chain_goodput == pytest.approx(0.6)
    assert summary.expected_end_t == pytest.approx(600.0 + 1000.0)
