"""Ages that are shown of a campaign whose machine's clock was set meanwhile, as NTP does: they are those that have passed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilient import clock, ledger
from resilient.driver.lease import LEASE, RunLease
from resilient.status import inspect
from resilient.watch.look import look

JUMPS_S = [0.0, 3600.0, -3600.0]


@contextmanager
def running(run_dir: Path) -> Iterator[RunLease]:
    """A campaign whose checkpoint and step are ten seconds old."""
    then = clock.now() - 10.0
    with ledger.Ledger(run_dir) as lines:
        lines.event("run_started", {"name": "gpt", "target_step": 9}, generation=0, t=then - 5.0)
        lines.event("generation_started", {"world_size": 1, "nodes": ["n"], "resumed_step": 0}, generation=1, t=then - 4.0)
        lines.event("committed", {"step": 3, "tier": "durable", "bytes": 1, "files": 1}, generation=1, t=then)
        lines.metrics({"step": 3, "loss": 1.0}, generation=1, t=then)
    lease = RunLease(run_dir)
    try:
        yield lease
    finally:
        lease.leave()


def set_by(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process reads that starts after the machine's clock was set."""
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + seconds)


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_the_age_of_a_checkpoint_and_the_time_of_a_job_are_those_that_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
):
    with running(tmp_path):
        set_by(jump_s, monkeypatch)
        found = inspect(tmp_path)
        assert found.state == "running" and found.checkpoint_age_s is not None
        assert 10.0 <= found.checkpoint_age_s < 100.0 and 15.0 <= found.wall_s < 100.0


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_a_campaign_whose_driver_was_killed_has_the_age_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
):
    with running(tmp_path):
        pass
    set_by(jump_s, monkeypatch)
    found = inspect(tmp_path)
    assert (tmp_path / LEASE).exists() and found.state == "interrupted" and found.checkpoint_age_s is not None
    assert 10.0 <= found.checkpoint_age_s < 100.0


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_a_campaign_that_gets_on_is_not_called_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float):
    with running(tmp_path):
        set_by(jump_s, monkeypatch)
        seen = look(tmp_path, time.time())
        assert 10.0 <= seen.now - seen.steps_t[-1] < 100.0


def test_the_clock_of_an_owner_on_another_machine_is_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with running(tmp_path):
        text = (tmp_path / LEASE).read_text()
    (tmp_path / LEASE).write_text(text.replace('"clock_zero": ', '"clock_zero": 1'))
    assert (inspect(tmp_path).checkpoint_age_s or 0.0) > 1e6  # by the clock of another driver of this machine
    machine = text.partition('"machine": "')[2].partition('"')[0]
    (tmp_path / LEASE).write_text(text.replace(machine, "another-boot").replace('"clock_zero": ', '"clock_zero": 1'))
    assert 10.0 <= (inspect(tmp_path).checkpoint_age_s or 0.0) < 100.0
