"""What a person is told, and the summary of a campaign."""

import io
import os
from typing import Any

import pytest
from rich.console import Console

from resilient.driver.display import Display, describe, duration, is_progress, size
from resilient.driver.terminal import PatientStream
from resilient.past.fold import past_of
from resilient.status import summarize

BASE = {"t": 100.0, "generation": 1, "host": "n0"}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140, highlight=False)


def text(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (42.4, "42 s"), (59.6, "1:00"), (185, "3:05"), (7807, "2:10:07"), (-3, "0 s")]
)
def test_durations_read_as_a_person_says_them(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(("count", "words"), [(12, "12 B"), (2048, "2.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")])
def test_sizes_read_as_a_person_says_them(count, words):
    assert size(count) == words


def test_plain_lines_come_now_and_then_and_always_at_the_end():
    now = [0.0]
    out = console()
    display = Display("auto", 100, console=out, clock=lambda: now[0])
    for step in range(1, 101):
        now[0] += 1.0
        display.metrics({"step": step, "loss": 2.5, "tokens_per_s": 1234.0, "step_s": 1.0})
    lines = text(out).splitlines()
    assert 18 <= len(lines) <= 22
    assert "step 100/100" in lines[-1]
    assert "loss 2.5000" in lines[0]
    assert "1,234 tokens/s" in lines[0]
    assert "left" in lines[0]


def test_faults_and_what_was_done_are_always_told():
    out = console()
    display = Display("plain", 100, console=out)
    display.event(
        {**BASE, "event": "fault", "fault_id": "g1-1", "kind": "exit", "ranks": [1], "nodes": [0], "step": 7, "detail": "SIGKILL"}
    )
    display.event({**BASE, "event": "action", "fault_id": "g1-1", "name": "restart_workers", "reason": "again"})
    display.event({**BASE, "event": "recovered", "fault_id": "g1-1", "step": 6, "downtime_s": 0.81, "lost_steps": 1})
    assert "rank 1 at step 7: SIGKILL" in text(out)
    assert "restart workers: again" in text(out)
    assert "recovered at step 6 after 0.81 s, 1 step computed again" in text(out)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"down_s": 21.2}, "recovered: the run directory could not be written for 21 s; training did not stop"),
        ({}, "recovered at step 6: training did not stop"),
        ({"downtime_s": 0.3}, "recovered at step 6 after 0.30 s, nothing lost"),
        ({"downtime_s": 0.3, "lost_steps": 2}, "recovered at step 6 after 0.30 s, 2 steps computed again"),
    ],
)
def test_a_recovery_says_for_how_long_training_stopped_or_that_it_did_not(fields, words):
    line = {**BASE, "event": "recovered", "fault_id": "g1-1", "step": 6, "downtime_s": 0.0, "lost_steps": 0, **fields}
    assert describe(line) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "down", "down_s": None, "detail": "no carrier"}, "link eth0 of node 3 (n0) is down: no carrier"),
        ({"state": "up", "down_s": 1.034}, "link eth0 of node 3 (n0) is up again after 1.03 s"),
        ({"state": "flapped", "down_s": 0.25}, "link eth0 of node 3 (n0) flapped: down for 0.25 s at most"),
        ({"state": "ib_errors", "down_s": None}, None),
        ({"state": "retransmissions", "down_s": None, "interface": None}, None),
    ],
)
def test_a_link_that_went_down_or_came_back_is_one_line(fields, words):
    assert describe({**BASE, "event": "link", "node": 3, "interface": "eth0", **fields}) == words


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (1, "snapshots of tier memory are taken at every step: a worker that dies costs up to 1 step"),
        (3, "snapshots of tier memory are taken every 3 steps: a worker that dies costs up to 3 steps"),
        (1_000_000, "tier memory takes snapshots on their way to slower tiers alone: others would cost too much, or have no room"),
    ],
)
def test_how_often_snapshots_are_taken_is_one_line(every, words):
    assert describe({**BASE, "event": "cadence", "step": 5, "tier": "memory", "every_steps": every}) == words


@pytest.mark.parametrize(("count", "so_far"), [(1, ""), (1024, "; 1,024 so far")])
def test_a_checkpoint_that_a_tier_does_without_is_told(count: int, so_far: str):
    line = {**BASE, "event": "checkpoint_missed", "step": 500, "tier": "durable", "reason": "no buffer was free", "count": count}
    assert describe(line) == f"step 500 has no checkpoint on tier durable: no buffer was free{so_far}"


def test_a_terminal_shows_one_line_that_moves_with_checkpoint_and_faults():
    out = console(terminal=True)
    display = Display("auto", 100, console=out)
    display.metrics({"step": 30, "loss": 2.5, "tokens_per_s": 1234.0, "step_s": 1.0})
    display.event({**BASE, "event": "committed", "step": 30})
    display.event(
        {**BASE, "event": "fault", "fault_id": "g1-1", "kind": "exit", "ranks": [1], "nodes": [0], "step": 7, "detail": "SIGKILL"}
    )
    display.refresh()
    display.close()
    assert "30/100" in text(out)
    assert "checkpoint 30" in text(out)
    assert "1 fault" in text(out)


@pytest.mark.parametrize("saved", ["before it is told", "after it is told", "both"])
def test_the_last_line_of_steps_has_the_checkpoint_of_the_last_step(saved: str):
    out = console()
    display = Display("plain", 120, console=out, clock=lambda: 0.0)
    committed = {**BASE, "event": "committed", "tier": "durable"}
    display.event({**committed, "step": 110})
    if saved != "after it is told":
        display.event({**committed, "step": 120})
    display.metrics({"step": 120, "loss": 2.5})
    if saved != "before it is told":
        display.event({**committed, "step": 120})
    display.event({**BASE, "event": "validation", "step": 120, "val_loss": 2.5})
    lines = [line.split(" ", 1)[1] for line in text(out).splitlines() if "loss 2.5000  " in line]
    assert lines[-1] == "step 120/120  loss 2.5000  checkpoint 120"
    assert len(lines) == 1 + (saved == "after it is told")


def test_none_says_nothing():
    out = console()
    display = Display("none", 10, console=out)
    display.metrics({"step": 10})
    display.event({**BASE, "event": "recovered", "step": 6, "downtime_s": 0.81, "lost_steps": 1})
    assert text(out) == ""


def test_events_of_others_need_no_word():
    assert describe({**BASE, "event": "something_else"}) is None


EVENTS: list[dict[str, Any]] = [
    {"host": "n1", **line}
    for line in [
        {"t": 0.0, "event": "run_started", "generation": 0, "name": "n", "target_step": 100},
        {"t": 5.0, "event": "committed", "generation": 1, "step": 10},
        {
            "t": 6.0,
            "event": "fault",
            "generation": 1,
            "fault_id": "a",
            "kind": "exit",
            "ranks": [1],
            "nodes": [0],
            "step": 12,
            "detail": "x",
            "evidence": "",
            "detect_s": 0.5,
        },
        {"t": 7.0, "event": "recovered", "generation": 2, "fault_id": "a", "step": 11, "downtime_s": 0.5, "lost_steps": 1},
    ]
]
METRICS = [{"t": 5.0, "generation": 1, "step": step, "loss": 3.0, "step_s": 2.0, "tokens_per_s": 10.0} for step in range(1, 21)]


def test_a_campaign_that_runs_is_summed_up():
    found = summarize(past_of(EVENTS, METRICS), locked=True, now=9.0)
    assert (found.state, found.step, found.target_step, found.generation) == ("running", 20, 100, 2)
    assert (found.faults, found.recovered, found.downtime_s, found.lost_steps) == (1, 1, 0.5, 1)
    assert (found.checkpoint_step, found.checkpoint_age_s, found.left_s) == (10, 4.0, pytest.approx(160.0))


@pytest.mark.parametrize(
    ("code", "state"), [(0, "reached"), (75, "stopped"), (70, "gave up"), (69, "ended"), (None, "interrupted")]
)
def test_a_campaign_that_does_not_run_says_why(code, state):
    ends = (
        [] if code is None else [{"host": "n1", "t": 9.0, "event": "run_finished", "generation": 2, "exit_code": code, "step": 20}]
    )
    assert summarize(past_of([*EVENTS, *ends], METRICS), locked=False, now=9.0).state == state


def test_nothing_yet_is_no_error():
    assert summarize(past_of([], []), locked=False, now=0.0).state == "not started"


def test_the_log_has_plain_lines_whatever_the_terminal_shows():
    for mode, terminal in (("live", True), ("plain", False), ("none", False)):
        now = [0.0]
        display = Display(mode, 10, console=console(terminal), clock=lambda now=now: now[0])
        for step in range(1, 11):
            now[0] += 1.0
            display.metrics({"step": step, "loss": 2.5, "step_s": 1.0})
        display.event({**BASE, "event": "recovered", "step": 6, "downtime_s": 0.81, "lost_steps": 1})
        display.close()
        lines = [line[len("2026-01-31 12:00:00 ") :].rstrip() for line in display.log.take()]
        assert lines[0].startswith("step 1/10  loss 2.5000") and lines[-2].startswith("step 10/10"), mode
        assert [is_progress(line) for line in lines] == [True] * (len(lines) - 1) + [False], mode
        assert lines[-1] == "recovered at step 6 after 0.81 s, 1 step computed again"


def test_a_terminal_that_does_not_keep_up_gets_no_more_frames():
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w") as writer:
        stream = PatientStream(writer)
        out = Console(file=stream, force_terminal=True, width=100)
        display = Display("live", 10, console=out)
        stream.write("x" * (1 << 17))
        before = len(stream._waiting)
        for _ in range(100):
            display.refresh()
        assert len(stream._waiting) <= before
        stream.gone = True
        display.close()
