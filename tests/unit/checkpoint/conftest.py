"""What tests of checkpoints share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import layout, points


@pytest.fixture(autouse=True)
def _no_armed_points() -> Iterator[None]:
    yield
    points.disarm()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of at most 256 bytes, so that small arrays have many."""
    monkeypatch.setattr(layout, "CHUNK_TARGET_BYTES", 256)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"
