"""What sinks keep in the run directory."""

import errno
import os
from pathlib import Path

import pytest

from resilient.sinks.position import identity_of


def test_a_campaign_has_one_id_also_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(old: Path, new: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(old), None, str(new))

    monkeypatch.setattr(os, "link", refused)
    first = identity_of(tmp_path)
    assert first and identity_of(tmp_path) == first
    assert [path.name for path in (tmp_path / "sinks").iterdir()] == ["id"]
