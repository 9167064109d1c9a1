"""A directory for spilled lines."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def spill_dir(tmp_path: Path) -> Iterator[Path]:
    path = Path("/dev/shm") / f"resilient-test-{os.getpid()}-{tmp_path.name}"
    yield path
    shutil.rmtree(path, ignore_errors=True)
