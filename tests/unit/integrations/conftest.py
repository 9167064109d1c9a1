"""Attempts of a script in one process, as the tests of its state have them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("checkpoint", "state")]

from attempts import Attempts, in_a_new_process
from lone_daemon import LoneDaemon


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    in_a_new_process(monkeypatch)
    with LoneDaemon(tmp_path / "d", buffers=3) as daemon, Attempts(daemon, monkeypatch) as found:
        yield found
