"""Another user of this machine, who makes files before we do. Needs root, as which the whole suite may be run."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

UID = 12345

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="acts as another user, which takes root"
)


def stranger(script: str, *arguments: object) -> None:
    """Run a shell script as a user who has nothing to do with us."""
    change = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
    subprocess.run([*change, "sh", "-ceu", script, "stranger", *map(str, arguments)], check=True, cwd="/")


@contextmanager
def stranger_for_a_while() -> Iterator[None]:
    """Meanwhile this process reads and writes files as he does."""
    os.seteuid(UID)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def shared_place() -> Iterator[Path]:
    """A directory in RAM in which everybody may make files, as `/dev/shm` is one."""
    path = Path(tempfile.mkdtemp(prefix="resilient-test-", dir="/dev/shm"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
