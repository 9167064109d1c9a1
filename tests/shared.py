"""What is computed once for all processes that run tests: reference campaigns, and data that they are trained on."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The directory of a name, which one of the processes makes while those wait that want it, too.

    Tests leave it as it is. Whatever `make` raises is raised, and the next one who asks makes it again.

    Args:
        make: fills an empty directory.
    """
    own = factory.getbasetemp()
    base = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    base.mkdir(exist_ok=True)
    place, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            done.touch()
        fcntl.flock(lock, fcntl.LOCK_UN)
    return place
