"""What signals and the clock come to, as a table: when a job must stop, why, and until when the stop may take."""

import pytest

from resilient.slurm.deadline import END_S, LEAD_SHARE, MARGIN_S, Known, Stop, due, lead_s, needed_s, signalled
from resilient.slurm.queue import QueuedJob

NOW = 10_000.0
LEAD, KILL = 60.0, 30.0
RUNNING = QueuedJob("7", "RUNNING", NOW + 3600)
PREEMPTED = QueuedJob("7", "RUNNING", NOW + 40, preempted=True)
OVERDUE = QueuedJob("7", "RUNNING", NOW - 5, preempted=True)
CANCELLED = QueuedJob("7", "COMPLETING", NOW)


def known(left_s: float | None, job: QueuedJob | None = RUNNING, needed: float = 20.0) -> Known:
    return Known(None if left_s is None else NOW + left_s, job, needed, LEAD, KILL)


@pytest.mark.parametrize(
    ("signal", "what", "name", "kind", "until_s"),
    [
        ("SIGTERM", known(3600), "SIGTERM", None, 3595),  # somebody asks: there is time until the limit
        ("SIGTERM", known(None), "SIGTERM", None, None),  # and no limit
        ("SIGTERM", known(3600, PREEMPTED), "preempted", "preempted", 35),
        ("SIGTERM", known(3600, OVERDUE), "preempted", "preempted", 25),
        ("SIGUSR1", known(3600, PREEMPTED), "preempted", "preempted", 35),  # PreemptParameters=send_user_signal
        ("SIGTERM", known(3600, CANCELLED), "SIGTERM", None, 25),  # scancel: KillWait runs
        ("SIGTERM", known(3600, None), "SIGTERM", None, 25),  # no answer: the worst is assumed
        ("SIGTERM", known(-1, CANCELLED), "time_limit", "time_limit", 25),
        ("SIGTERM", known(2), "time_limit", "time_limit", 25),  # KillWait runs, or is about to
        ("SIGTERM", known(15), "time_limit", "time_limit", 10),
        ("SIGUSR1", known(15), "time_limit", "time_limit", 10),
        ("SIGUSR1", known(100), None, None, None),  # ahead of the limit, early: the clock knows better
        ("SIGUSR1", known(3600), "SIGUSR1", None, 3595),  # far from the limit only a person sends it
        ("SIGUSR1", known(None, None), "SIGUSR1", None, None),  # the end is not known: the signal is all there is
    ],
)
def test_signals_are_told_apart(signal, what, name, kind, until_s):
    stop = signalled(signal, what, NOW)
    if name is None:
        assert stop is None
        return
    assert (stop.name, stop.kind) == (name, kind)
    assert stop.until_t == (None if until_s is None else NOW + until_s)


@pytest.mark.parametrize(
    ("what", "kill_wait_s", "until_s"),
    [
        (CANCELLED, 5.0, 2.5),
        (None, 2.0, 1.0),
        (QueuedJob("7", "RUNNING", NOW + 4, preempted=True), KILL, 2.0),
        (PREEMPTED, 5.0, 35.0),
    ],
)
def test_a_drain_gets_half_of_a_time_that_is_as_short_as_what_comes_after_it(what, kill_wait_s, until_s):
    stop = signalled("SIGTERM", Known(NOW + 3600, what, 20.0, LEAD, kill_wait_s), NOW)
    assert stop is not None
    assert stop.until_t == NOW + until_s


@pytest.mark.parametrize(("left_s", "stops"), [(21, False), (20, True), (6, True), (-3, True), (None, False)])
def test_a_drain_begins_by_itself_when_no_more_time_is_left_than_it_needs(left_s, stops):
    stop = due(known(left_s), NOW)
    assert (stop is not None) == stops
    if stop is not None:
        until_t = NOW + left_s - min(END_S, max(0, left_s) / 2)  # there must be some time for the drain itself
        assert stop == Stop("time_limit", "time_limit", until_t, stop.detail)


@pytest.mark.parametrize(
    ("measured", "asked", "needed"),
    [
        (None, False, LEAD),  # nothing is known yet
        (None, True, LEAD),
        (3.0, False, 6.0 + MARGIN_S + END_S),  # twice what it took, and some
        (300.0, False, 600.0 + MARGIN_S + END_S),
        (300.0, True, LEAD),  # the config says when at the soonest
    ],
)
def test_the_need_of_a_drain_is_measured(measured, asked, needed):
    assert needed_s(measured, lead_s=LEAD, asked=asked) == needed


@pytest.mark.parametrize(
    ("asked", "time_s", "lead"),
    [
        (None, None, 60.0),
        (None, 86400.0, 60.0),
        (None, 60.0, 60.0 * LEAD_SHARE),
        (None, 20.0, MARGIN_S + END_S),
        (40.0, 60.0, 40.0),
    ],
)
def test_the_lead_takes_no_large_part_of_a_short_job_unless_the_config_says_so(asked, time_s, lead):
    assert lead_s(asked, drain_s=25.0, time_s=time_s) == lead
