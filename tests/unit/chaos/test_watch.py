"""What is known of a campaign while it is broken."""

import json
from pathlib import Path

from chaos.staging.watch import Watch
from resilient import ledger


def test_a_step_that_is_told_late_is_not_the_last_one(tmp_path: Path):
    lines = [{"step": step, "t": float(t), "loss": 1.0, "step_s": 0.1} for t, step in ((1, 1), (2, 2), (4, 3), (5, 4), (3, 3))]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = Watch(tmp_path)
    watch.look()
    assert (watch.step, watch.furthest, watch.furthest_t) == (4, 4, 5.0)
    assert watch.goes_on_since(3.5, 2)
    assert not watch.goes_on_since(3.5, 3)
    assert watch.steady(5) is None


def test_what_was_lost_does_not_count_as_the_furthest_again(tmp_path: Path):
    lines = [{"step": step, "t": float(t)} for t, step in enumerate((1, 2, 3, 2, 3))]
    (tmp_path / ledger.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = Watch(tmp_path)
    watch.look()
    assert (watch.step, watch.furthest, watch.furthest_t) == (3, 3, 2.0)
