"""What is known of a campaign while it is broken."""

import json
import signal
import time
from pathlib import Path

import pytest

from chaos.orchestration import watch as of_watch
from chaos.orchestration.watch import Watch
from resilient import ledger

LINE = {"t": 1.0, "host": "vm", "generation": 1}
WHO = {"ranks": [], "nodes": [0], "step": 3}
COST = {"step": 4, "downtime_s": 0.0, "lost_steps": 0}


def test_a_step_that_is_told_late_is_not_the_last_one(tmp_path: Path):
    lines = [
        {"step": step, "generation": 1, "t": float(t), "loss": 1.0, "step_s": 0.1}
        for t, step in ((1, 1), (2, 2), (4, 3), (5, 4), (3, 3))
    ]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = Watch(tmp_path)
    watch.poll()
    assert (watch.step, watch.furthest, watch.furthest_t) == (4, 4, 5.0)
    assert watch.goes_on_since(3.5, 2)
    assert not watch.goes_on_since(3.5, 3)
    assert watch.steady(5) is None


def test_what_was_lost_does_not_count_as_the_furthest_again(tmp_path: Path):
    lines = [{"step": step, "generation": 1, "t": float(t)} for t, step in enumerate((1, 2, 3, 2, 3))]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = Watch(tmp_path)
    watch.poll()
    assert (watch.step, watch.furthest, watch.furthest_t) == (3, 3, 2.0)


def test_a_tier_is_well_once_what_was_told_of_it_is_recovered_from(tmp_path: Path):
    with (tmp_path / ledger.EVENTS).open("a", buffering=1) as events:
        watch = Watch(tmp_path)
        for event, well in (
            ({"event": "fault", "fault_id": "s1", "kind": "storage", **WHO, "detail": "", "evidence": "", "detect_s": 0.0}, True),
            ({"event": "action", "fault_id": "s1", "name": "degrade_tier", "reason": ""}, False),
            ({"event": "recovered", "fault_id": "g1-2", **COST}, False),
            ({"event": "recovered", "fault_id": "s1", **COST}, True),
            ({"event": "action", "fault_id": "s2", "name": "degrade_tier", "reason": ""}, False),
            ({"event": "run_started", "name": "run", "target_step": 9}, True),
        ):
            events.write(json.dumps(LINE | event) + "\n")
            watch.poll()
            assert watch.tiers_are_well == well, event


@pytest.mark.parametrize(("steps", "stays"), [(2, True), (3, False)])
def test_a_tier_stays_well_once_steps_were_finished_after_its_recovery(tmp_path: Path, steps: int, stays: bool):
    metrics = [{"step": step, "generation": 1, "t": float(step)} for step in range(1, 8)]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in metrics))
    events = [
        {"event": "action", "fault_id": "s1", "name": "degrade_tier", "reason": ""},
        {"event": "recovered", "fault_id": "s1", **COST, "t": 5.5},
    ]
    (tmp_path / ledger.EVENTS).write_text("".join(json.dumps(LINE | event) + "\n" for event in events))
    watch = Watch(tmp_path)
    watch.poll()
    assert watch.tiers_stay_well(steps) == stays


@pytest.mark.parametrize(("name", "goes_on"), [("grow", True), ("departed", True), ("restart_workers", False)])
def test_what_is_told_of_nodes_after_a_recovery_stops_no_rank(tmp_path: Path, name: str, goes_on: bool):
    (tmp_path / ledger.METRICS).write_text(json.dumps({"step": 5, "generation": 1, "t": 9.0}) + "\n")
    fault = {"event": "fault", "fault_id": "g1-1", "kind": "node_lost", **WHO, "detail": "", "evidence": "", "detect_s": 0.0}
    action = {"event": "action", "fault_id": "g1-1", "reason": ""}
    events = [fault, action | {"name": "replace_node"}, {"event": "recovered", "fault_id": "g1-1", **COST}, action | {"name": name}]
    (tmp_path / ledger.EVENTS).write_text("".join(json.dumps(LINE | event) + "\n" for event in events))
    watch = Watch(tmp_path)
    watch.poll()
    assert watch.goes_on_since(8.0) == goes_on


def test_lines_without_a_step_or_with_half_an_event_end_no_experiment(tmp_path: Path):
    step = {"generation": 1, "t": 1.0, "step": 1, "loss": None, "step_s": None}
    lines = [step, {"generation": 1, "t": 2.0, "accuracy": 0.5}, {"t": "late"}, step | {"step": 2, "t": 3.0}]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / ledger.EVENTS).write_text(json.dumps({"t": 1.0}) + "\n" + json.dumps(LINE | {"event": "run_finished"}) + "\n")
    watch = Watch(tmp_path)
    assert watch.poll() == []
    assert (watch.step, watch.steady(2)) == (2, (0.0, False))  # null: the loss was not finite


@pytest.mark.parametrize(
    ("line", "finite"), [({"loss": None}, False), ({"loss": None, "skipped": "rolled_back"}, True), ({}, True), ({"loss": 2}, True)]
)
def test_a_loss_that_is_null_was_not_finite_unless_nothing_was_computed(tmp_path: Path, line: dict[str, object], finite: bool):
    (tmp_path / ledger.METRICS).write_text(json.dumps({"generation": 1, "t": 1.0, "step": 1, "step_s": 0.5, **line}) + "\n")
    watch = Watch(tmp_path)
    watch.poll()
    assert watch.steady(1) == (0.5, finite)


@pytest.mark.parametrize(("finished", "code"), [({"exit_code": 75, "step": 3}, 75), (None, -signal.SIGKILL)])
def test_a_run_whose_driver_is_gone_without_a_word_has_not_reached_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: dict[str, int] | None, code: int
):
    monkeypatch.setattr(of_watch, "SUCCESSOR_S", 0.1)
    monkeypatch.setattr(of_watch, "ASK_S", 0.0)
    lines = [
        {"event": "run_started", "name": "run", "target_step": 9},
        *([{"event": "run_finished", **finished}] if finished else []),
    ]
    (tmp_path / ledger.EVENTS).write_text("".join(json.dumps(LINE | line) + "\n" for line in lines))
    watch = Watch(tmp_path)
    watch.poll()
    while (found := watch.ended(tmp_path)) is None:
        time.sleep(0.01)
    assert found == code
