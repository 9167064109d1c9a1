"""The fence: which generation may publish in a directory of checkpoints.

Owns the files `.fence` (the newest generation, a decimal number) and `.fence.lock` of the directory. Whoever publishes
does so inside `guard`, which holds the lock shared; `raise_fence` holds it alone. So once `raise_fence(root, g)` has
returned, no commit of a generation below g is under way or will ever succeed. The lock is flock(2): the file system must
carry it across the nodes that write (Lustre: mount option `flock`).

Must import nothing heavy: the process that calls `raise_fence` has neither torch nor zarr.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint import points
from checkpoint.errors import CheckpointError, StaleGeneration
from checkpoint.locks import flock

FENCE = ".fence"
LOCK = ".fence.lock"
_POLL_S = 0.005
_DIGITS = 18  # of a generation, at most


def newest_generation(root: Path) -> int | None:
    """The generation that the fence names, or None where none was ever raised.

    Raises CheckpointError when the file holds anything but a number.
    """
    path = root / FENCE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    if not text.strip().isdigit() or len(text.strip()) > _DIGITS:
        raise CheckpointError(
            f"{path} should hold the number of a generation and holds {text[:40]!r}; "
            "write into it the newest generation that has run"
        )
    return int(text)


def raise_fence(root: Path, generation: int, *, timeout_s: float | None = None, make: bool = True) -> int:
    """Refuse every generation below `generation` from now on, durably; return the newest generation known.

    The fence never sinks: an older number changes nothing. Waits for commits that are under way, forever or `timeout_s`
    seconds. Raises TimeoutError when that passes, ValueError for a negative generation, OSError.

    Args:
        make: the root where it is not there.
    """
    if generation < 0:
        raise ValueError(f"a generation is a number from 0 on, not {generation}")
    if make:
        root.mkdir(parents=True, exist_ok=True)
    with _locked(root, fcntl.LOCK_EX, timeout_s):
        newest = newest_generation(root)
        if newest is not None and newest >= generation:
            return newest
        temporary = root / f"{FENCE}.tmp"
        with temporary.open("wb") as file:
            file.write(b"%d\n" % generation)
            file.flush()
            os.fsync(file.fileno())
        points.reached("fence_written")
        temporary.replace(root / FENCE)
        points.reached("fence_replaced")
        fsync_directory(root)
        return generation


@contextmanager
def guard(root: Path, generation: int) -> Iterator[None]:
    """Publish inside this: no fence is raised meanwhile.

    Raises StaleGeneration, before the body runs, when a newer generation has raised the fence; OSError.
    """
    with _locked(root, fcntl.LOCK_SH, None):
        newest = newest_generation(root)
        if newest is not None and newest > generation:
            raise StaleGeneration(root, generation, newest)
        yield


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _locked(root: Path, mode: int, timeout_s: float | None) -> Iterator[None]:
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _acquire(fd, root, mode, timeout_s)
        yield
    finally:
        os.close(fd)  # releases the lock


def _acquire(fd: int, root: Path, mode: int, timeout_s: float | None) -> None:
    if timeout_s is None:
        flock(fd, root / LOCK, mode)
        return
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            flock(fd, root / LOCK, mode | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{root / LOCK} has been held for {timeout_s:g} s by a process that is publishing a checkpoint; "
                    "end that process"
                ) from None
            time.sleep(_POLL_S)
