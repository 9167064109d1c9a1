"""What tests of scripts that say nothing share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from watched_rank import Time, Watched


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr("resilient.clock.now", lambda: made.now)
    return made


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "region")
    yield made
    for handle in made.progress._stop.handles:
        handle.remove()
    made.agent.close()
