"""What a person sees of a chain."""

import pytest

from resilient.slurm.chain import whole
from resilient.slurm.history import JobLine, history, queued_s
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
    [
        (QUEUE, ["running", "waiting"]),
        ([], ["ended without a word", "gone before it began"]),
        (None, ["running", "waiting"]),
    ],
)
def test_a_job_that_the_queue_does_not_know_has_ended_or_never_began_unless_nobody_answers(queue, states):
    assert [line.state for line in history(RECORDS, queue)][1:] == states


def test_a_job_that_was_requeued_waits_and_runs_again():
    again = [*RECORDS[:5], {"t": 600.0, "what": "started", "job": "7", "step": 40}]
    line = history(again, [QueuedJob("7", "RUNNING", 900.0)])[0]
    assert (line.state, line.started_t, line.ended_t, line.exit_code) == ("running", 600.0, None, None)


def waited_s(records, queue, runs, now, older_s: float = 0.0) -> float | None:
    return queued_s(records, history(records, queue), runs, sum(end - begin for begin, end in runs) + older_s, now)


def test_the_time_in_the_queue_is_what_no_job_covers():
    runs = [(100.0, 400.0), (500.0, 600.0)]
    assert waited_s(RECORDS, QUEUE, runs, 600.0) == 200.0
    assert waited_s(RECORDS, QUEUE, runs[1:], 600.0, older_s=300.0) == 200.0  # only the newest are known one by one
    assert waited_s(RECORDS[:2], [QueuedJob("7", "PENDING")], [], 60.0) == 60.0
    over = [*RECORDS[:5], {"t": 401.0, "what": "cancelled", "job": "8"}]
    assert waited_s(over, [], runs[:1], 9000.0) == 100.0  # nothing is waited for any more
    assert waited_s([], [], runs, 9000.0) is None
    refused = [{"t": 8000.0, "what": "begun", "name": "x"}, {"t": 8001.0, "what": "refused", "reason": "no account"}]
    assert waited_s(list(whole([*over, *refused])), [], runs[:1], 9000.0) == 100.0
    assert waited_s(list(whole(refused)), [], [], 9000.0) is None


def test_a_run_before_the_first_submission_takes_nothing_from_the_queue():
    early = [(-5000.0, -1000.0), (-50.0, 50.0)]
    assert waited_s(RECORDS, QUEUE, [*early, (100.0, 400.0), (500.0, 600.0)], 600.0) == 150.0


def test_a_job_that_was_killed_ends_the_queue_with_its_last_line():
    assert waited_s(RECORDS, [], [(100.0, 400.0), (500.0, 800.0)], 9000.0) == 200.0
    again = [*RECORDS, {"t": 9000.0, "what": "begun", "name": "x"}, {"t": 9001.0, "what": "submitted", "job": "10"}]
    assert waited_s(again, [QueuedJob("10", "PENDING")], [(100.0, 400.0), (500.0, 800.0)], 9010.0) == 210.0


@pytest.mark.parametrize(
    "end", [{"t": 800.0, "what": "stopped"}, {"t": 800.0, "what": "ended", "job": "8", "exit_code": 70}], ids=["stopped", "gave up"]
)
def test_between_the_end_of_a_chain_and_the_next_submission_nothing_waits(end):
    runs = [(100.0, 400.0), (500.0, 800.0)]
    assert waited_s([*RECORDS, end], [], runs, 9000.0) == 200.0
    again = [*RECORDS, end, {"t": 9000.0, "what": "begun", "name": "x"}, {"t": 9001.0, "what": "submitted", "job": "10"}]
    assert waited_s(again, [QueuedJob("10", "PENDING")], [*runs, (2000.0, 3000.0)], 9010.0) == 210.0


@pytest.mark.parametrize(
    ("state", "more", "queue", "unfollowed"),
    [
        ("stopped", [], [], True),
        ("stopped", [], [QueuedJob("8", "COMPLETING")], True),
        ("stopped", [], [QueuedJob("9", "PENDING")], False),
        ("stopped", [], None, False),  # Slurm does not say
        ("stopped", [{"t": 900.0, "what": "stopped"}], [], False),  # it is over
        ("running", [], [], False),
    ],
)
def test_a_chain_that_is_not_over_and_has_no_job_is_said_to_have_none(state, more, queue, unfollowed):
    summary = Summary(state=state)
    add_chain(summary, [*RECORDS, *more], queue, 1000.0)
    assert summary.unfollowed == unfollowed


def test_the_queue_counts_in_the_goodput_and_in_the_expected_end():
    summary = Summary(goodput=0.9, wall_s=400.0, left_s=600.0)
    add_chain(summary, RECORDS, QUEUE, 600.0)
    assert summary.queued_s == 200.0
    assert summary.chain_goodput == pytest.approx(0.6)
    assert summary.expected_end_t == pytest.approx(600.0 + 1000.0)
