"""driver.log: all that was said, in order, by the run directory's writer; it is moved aside where it is long."""

import logging
import threading
from collections import deque
from pathlib import Path

import pytest

from resilient.driver import rundir
from resilient.driver.driver_log import DriverLog
from resilient.driver.lease import LOCK
from resilient.driver.rundir import RunDirFiles
from resilient.logs.paths import DRIVER_LOG
from resilient.protocol.disk import Item


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / LOCK).touch()
    return tmp_path


def items(*texts: str, first: int = 1) -> deque[Item]:
    return deque(Item(first + number, DRIVER_LOG, text) for number, text in enumerate(texts))


def test_what_is_said_has_its_date_and_further_lines_are_indented():
    log = DriverLog()
    log.note("one\ntwo")
    log.emit(logging.LogRecord("resilient.x", logging.WARNING, "", 0, "three %d", (3,), None))
    first, second = log.take()
    stamp = len("2026-01-31 12:00:00 ")
    assert first[stamp:] == "one\n    two\n" and first[:2] == "20"
    assert second[stamp:] == "WARNING resilient.x: three 3\n"
    assert log.take() == []


def test_threads_may_say_something_at_once():
    log = DriverLog()
    threads = [threading.Thread(target=lambda: [log.note("x") for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    found = []
    while any(thread.is_alive() for thread in threads):
        found += log.take()
    assert len(found + log.take()) == 2000


def test_last_words_go_to_the_file_of_a_run_directory_that_is_ours(run_dir: Path):
    log = DriverLog()
    log.begin()
    log.note("done")
    log.finish(run_dir)
    assert (run_dir / DRIVER_LOG).read_text().endswith("done\n")


@pytest.mark.parametrize("taken_over", [True, False])
def test_nothing_is_written_into_a_run_directory_of_somebody_else(run_dir: Path, taken_over: bool):
    log = DriverLog()
    if taken_over:
        log.begin()
        log.abandon()
    log.note("done")
    log.finish(run_dir)
    assert not (run_dir / DRIVER_LOG).exists()


def test_a_long_log_is_moved_aside_and_the_oldest_goes(run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rundir, "LOG_BYTES", 100)
    files = RunDirFiles(run_dir, None)
    for number in range(85):
        files.write(items(f"line {number:04}\n", first=number + 1))
    files.close()
    there = sorted(path.name for path in run_dir.glob(f"{DRIVER_LOG}*"))
    assert there == [DRIVER_LOG, *(f"{DRIVER_LOG}.{number}" for number in range(1, rundir.OLD_LOGS + 1))]
    kept = "".join((run_dir / name).read_text() for name in [*reversed(there[1:]), DRIVER_LOG]).splitlines()
    assert kept == [f"line {number:04}" for number in range(85 - len(kept), 85)]
    assert len(kept) >= 40


def test_a_log_that_cannot_be_written_keeps_no_line_of_the_ledger_back(run_dir: Path):
    (run_dir / DRIVER_LOG).mkdir()
    files = RunDirFiles(run_dir, None)
    pending = deque([Item(1, DRIVER_LOG, "x\n"), Item(2, "events.jsonl", "{}\n")])
    files.write(pending)
    files.close()
    assert not pending
    assert (run_dir / "events.jsonl").read_text() == "{}\n"
