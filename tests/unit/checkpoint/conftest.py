"""What tests of checkpoints share."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_commands import part
from checkpoint_state import local_shards
from daemon_lab import Lab
from lone_daemon import LoneDaemon

from checkpoint import layout, points, save


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
def daemon(base: Path) -> Iterator[LoneDaemon]:
    """A snapshot daemon by itself, with its settings."""
    with LoneDaemon(base) as found:
        found.start()
        yield found


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


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """A run directory with two tiers: parts in a node's RAM, and whole checkpoints, one of which is damaged."""
    for step in (100, 200, 300):
        save(tmp_path / "checkpoints", step, local_shards(float(step)), {"step": step}, generation=1)
    (tmp_path / "checkpoints/step-00000200/manifest.json").unlink()
    part(tmp_path / "node0", 350, 0, 2)
    (tmp_path / "node0/step-00000360").mkdir()
    (tmp_path / "node0/step-00000360/part.json").write_text("{")
    tiers = [
        {"name": "ram", "durable": False, "roots": [str(tmp_path / "node0"), "/nowhere/node1"]},
        {"name": "durable", "durable": True, "roots": [str(tmp_path / "checkpoints")]},
    ]
    (tmp_path / "storage.json").write_text(json.dumps({"tiers": tiers}))
    return tmp_path
