"""The snapshot daemon of these tests is that of the checkpoints' tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))

from attempts import Attempts, in_a_new_process
from lone_daemon import LoneDaemon


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_new_process(monkeypatch)


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    with LoneDaemon(tmp_path / "d", buffers=3) as daemon, Attempts(daemon, monkeypatch) as found:
        yield found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LoneDaemon]:
    """For ranks of a test's own."""
    with LoneDaemon(tmp_path / "d", buffers=3) as found:
        found.start()
        yield found


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
