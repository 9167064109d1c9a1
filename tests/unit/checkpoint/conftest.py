"""What tests of checkpoints share."""

import os
import random
import shutil
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


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(count: int = 2, **settings: Any) -> Lab:
        # Short, because the path of a socket may have 107 characters.
        base = Path(f"/tmp/lab-{os.getpid()}-{random.randrange(1 << 30)}")
        made.append(Lab(base, count, **settings))
        made[-1].boot()
        return made[-1]

    yield make
    for each in made:
        each.kill()
        shutil.rmtree(each.base, ignore_errors=True)
