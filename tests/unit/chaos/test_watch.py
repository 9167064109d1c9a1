"""What is known of a campaign while it is broken."""

import json
from pathlib import Path

from chaos.orchestration.watch import Watch
from resilient import ledger


def test_a_step_that_is_told_late_is_not_the_last_one(tmp_path: Path):
    lines = [{"step": step, "t": float(t), "loss": 1.0, "step_s": 0.1} for t, step in ((1, 1), (2, 2), (4, 3), (5, 4), (3, 3))]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = Watch(tmp_path)
    watch.poll()
    assert (watch.step, watch.furthest, watch.furthest_t) == (4, 4, 5.0)
    assert watch.goes_on_since(3.5, 2)
    assert not watch.goes_on_since(3.5, 3)
    assert watch.steady(5) is None


def test_what_was_lost_does_not_count_as_the_furthest_again(tmp_path: Path):
    lines = [{"step": step, "t": float(t)} for t, step in enumerate((1, 2, 3, 2, 3))]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = Watch(tmp_path)
    watch.poll()
    assert (watch.step, watch.furthest, watch.furthest_t) == (3, 3, 2.0)


def test_a_tier_is_well_once_what_was_told_of_it_is_recovered_from(tmp_path: Path):
    with (tmp_path / ledger.EVENTS).open("a", buffering=1) as events:
        watch = Watch(tmp_path)
        for event, well in (
            ({"event": "fault", "fault_id": "s1", "kind": "storage"}, True),
            ({"event": "action", "fault_id": "s1", "name": "degrade_tier"}, False),
            ({"event": "recovered", "fault_id": "g1-2"}, False),
            ({"event": "recovered", "fault_id": "s1"}, True),
            ({"event": "action", "fault_id": "s2", "name": "degrade_tier"}, False),
            ({"event": "run_started"}, True),
        ):
            events.write(json.dumps({"t": 1.0, "host": "vm", **event}) + "\n")
            watch.poll()
            assert watch.tiers_are_well == well, event
