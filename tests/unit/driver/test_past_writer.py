"""The past is kept while a job writes, and what keeps it from being written is nobody's trouble."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient import ledger
from resilient.driver.lease import LOCK
from resilient.driver.past_writer import PastWriter
from resilient.past.record import FILE, Reader

PATIENCE_S = 120.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / LOCK).touch()
    return tmp_path


def step(run_dir: Path, number: int) -> None:
    with (run_dir / ledger.METRICS).open("a") as file:
        file.write(json.dumps({"t": float(number), "generation": 1, "step": number, "step_s": 1.0}) + "\n")
    with (run_dir / ledger.EVENTS).open("a") as file:
        file.write(
            json.dumps({"t": number + 0.1, "event": "snapshot", "generation": 1, "host": "n", "step": number, "stall_s": 0}) + "\n"
        )


def kept_bytes(run_dir: Path) -> int:
    """How much of the metrics is in what is kept."""
    return Reader(run_dir).marks.final.metrics.offset


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_was_written_is_kept_at_once_and_at_the_end(run_dir: Path):
    writer = PastWriter(run_dir, every_s=3600.0)
    step(run_dir, 1)
    writer.written()
    wait_for((run_dir / FILE).exists)
    for number in range(2, 50):
        step(run_dir, number)
        writer.written()
    writer.finish(PATIENCE_S)
    assert kept_bytes(run_dir) == (run_dir / ledger.METRICS).stat().st_size
    assert not list(run_dir.glob(f"{FILE}.*"))


def test_a_file_that_cannot_be_written_is_written_later(run_dir: Path):
    (run_dir / FILE).mkdir()
    writer = PastWriter(run_dir, every_s=0.02)
    step(run_dir, 1)
    writer.written()
    (run_dir / FILE).rmdir()
    step(run_dir, 2)
    writer.written()
    wait_for((run_dir / FILE).is_file)
    writer.finish(PATIENCE_S)
    assert kept_bytes(run_dir) == (run_dir / ledger.METRICS).stat().st_size


def test_nothing_is_written_where_the_run_directory_is_not(run_dir: Path):
    (run_dir / LOCK).unlink()  # as at the place where a file system was mounted
    step(run_dir, 1)
    writer = PastWriter(run_dir, every_s=0.02)
    writer.written()
    writer.finish(PATIENCE_S)
    assert not list(run_dir.glob(f"{FILE}*"))
