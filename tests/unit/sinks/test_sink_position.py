"""What sinks keep in the run directory."""

import errno
import os
from pathlib import Path

import pytest

from resilient.sinks.position import Position, identity_of


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
