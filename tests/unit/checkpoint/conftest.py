"""What tests of checkpoints share."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import Lab

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


def _short_directory() -> Path:
    """Short, because the path of a socket may have 107 characters."""
    return Path(tempfile.mkdtemp(prefix="ckpt-", dir="/tmp"))


@pytest.fixture
def base() -> Iterator[Path]:
    """An empty directory for a snapshot daemon."""
    path = _short_directory()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(count: int = 2, **settings: Any) -> Lab:
        made.append(Lab(_short_directory(), count, **settings))
        made[-1].boot()
        return made[-1]

    yield make
    for each in made:
        each.kill()
        shutil.rmtree(each.base, ignore_errors=True)
