"""What sinks keep in the run directory."""

import errno
import os
import threading
from pathlib import Path

import pytest

from resilient import ledger
from resilient.sinks.following import LineFile
from resilient.sinks.position import Position, identity_of
from resilient.sinks.pump import Pump
from resilient.sinks.webhook import WebhookSink


def test_a_campaign_has_one_id_also_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(old: Path, new: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(old), None, str(new))

    monkeypatch.setattr(os, "link", refused)
    first = identity_of(tmp_path)
    assert first and identity_of(tmp_path) == first
    assert [path.name for path in (tmp_path / "sinks").iterdir()] == ["id"]


def test_a_sink_is_fed_by_one_process_at_a_time_and_the_other_one_says_why_it_waits(tmp_path: Path) -> None:
    first = Position(tmp_path, "webhook", 0.0)
    with pytest.raises(BlockingIOError, match="another process feeds this sink"):
        Position(tmp_path, "webhook", 0.0)
    Position(tmp_path, "mlflow", 0.0).close()
    first.keep({"events.jsonl": 7})
    first.close()
    second = Position(tmp_path, "webhook", 5.0)
    assert (second.since_t, second.at_bytes) == (0.0, {"events.jsonl": 7})
    second.close()


def test_a_position_that_could_not_be_written_keeps_nobody_from_feeding_the_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Position, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            Position(tmp_path, "webhook", 0.0)
    Position(tmp_path, "webhook", 0.0).close()


def feed(written, receiver, began_t: float) -> list[int]:
    """The steps of the faults that a job's pump sends to the end of the files."""
    ending, before = threading.Event(), len(receiver.told())
    ending.set()
    settings = {"url": receiver.url, "pause_s": 0.01}
    Pump("webhook", WebhookSink, written.campaign(), settings, began_t=began_t, ending=ending).run()
    return [each["step"] for each in receiver.told()[before:]]


def faults(written, *steps: int) -> None:
    for step in steps:
        written.t += 1.0
        fields = {"ranks": [1], "nodes": [0], "step": step, "detail": "it died", "evidence": "", "detect_s": 0.5}
        written.event("fault", 1, fault_id=f"f{step}", kind="exit", **fields)


@pytest.mark.parametrize("began_s", [3600.0, None], ids=["a job", "by hand"])
def test_a_position_that_cannot_be_read_sends_what_came_since_it_was_written_and_not_the_campaign_again(
    written, receiver, caplog: pytest.LogCaptureFixture, began_s: float | None
) -> None:
    faults(written, 1, 2)
    assert feed(written, receiver, 1.0) == [1, 2]
    kept = written.run_dir / "sinks/webhook.json"
    kept.write_bytes(b"")
    os.utime(kept, (written.t + 1000.0,) * 2)
    written.t += 1000.0
    faults(written, 3)
    assert feed(written, receiver, 0.0 if began_s is None else written.t + began_s) == [3]
    assert [each.getMessage().partition(";")[0] for each in caplog.records] == ["webhook: how far it has come cannot be read"]
    assert feed(written, receiver, written.t) == []


def test_what_comes_in_place_of_lines_that_a_file_has_lost_is_sent(written, receiver, caplog: pytest.LogCaptureFixture) -> None:
    path = written.run_dir / ledger.EVENTS
    faults(written, 1, 2)
    kept = path.stat().st_size
    faults(written, 3, 4, 5)
    assert feed(written, receiver, 1.0) == [1, 2, 3, 4, 5]
    os.truncate(path, kept + 9)
    assert feed(written, receiver, written.t) == [], "what has come before the end of the file was sent"
    again = type(written)(written.run_dir)
    again.t = written.t
    faults(again, 6)
    assert feed(again, receiver, again.t) == [6], "the file is still shorter than it was"
    assert len(caplog.records) == 1 and "has lost lines that were read" in caplog.text
    os.truncate(path, kept)
    again = type(written)(written.run_dir)
    again.t = written.t + 100.0
    faults(again, *range(7, 17))
    assert feed(again, receiver, again.t) == list(range(7, 17)), "it is longer than it was"
    assert feed(again, receiver, again.t) == []


def test_lines_that_come_back_as_they_were_are_sent_once(written, receiver) -> None:
    path = written.run_dir / ledger.EVENTS
    faults(written, 1, 2, 3)
    whole = path.read_bytes()
    assert feed(written, receiver, 1.0) == [1, 2, 3]
    os.truncate(path, len(whole) - 60)
    assert feed(written, receiver, written.t) == []
    path.write_bytes(whole)
    assert feed(written, receiver, written.t) == []


def test_what_was_lost_while_a_file_is_read_is_noticed(written) -> None:
    path = written.run_dir / ledger.EVENTS
    faults(written, 1)
    kept = path.stat().st_size
    faults(written, 2, 3)
    file = LineFile(path)
    assert [line.entry["step"] for line in file.read()] == [1, 2, 3]
    os.truncate(path, kept)
    assert file.read() == []
    again = type(written)(written.run_dir)
    again.t = written.t
    faults(again, 4, 5, 6, 7)
    assert [line.entry["step"] for line in file.read()] == [4, 5, 6, 7]
    path.unlink()
    assert file.read() == [], "a file system that is not mounted is waited for"
