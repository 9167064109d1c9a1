"""Files that appear whole or not at all, and one builder at a time.

Owns temporary names, fsync and rename. Never reads or interprets what it stores.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.data.errors import StorageError


def beside(path: Path) -> Path:
    """The temporary name of a file. Always the same one: its builder holds a lock, so what lies there is of a dead one."""
    return path.with_name(f"{path.name}.tmp")


def write_beside(path: Path, content: bytes) -> None:
    """Write a file under its temporary name, durably."""
    with beside(path).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(paths: list[Path]) -> None:
    """Rename files into place: all but the last one, and, when these are durable, the last.

    The last one is the mark that all are there: an old one goes away first, so it never stands beside new companions.
    """
    *companions, mark = paths
    mark.unlink(missing_ok=True)
    sync_directory(mark.parent)
    for path in companions:
        beside(path).replace(path)
    sync_directory(mark.parent)
    beside(mark).replace(mark)
    sync_directory(mark.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no fsync of directories
            raise
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting for it as long as it takes. The lock falls with its process; the file goes with the lock.

    Raises:
        StorageError: the file system has no locks.
    """
    fd = _acquired(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _acquired(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Whoever held it has removed the file: then this descriptor is of a file that nobody else will lock.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass  # removed between the two looks
        except OSError as error:
            os.close(fd)
            raise StorageError(
                f"{path.parent} is on a file system without file locks ({error.strerror}); choose another directory"
            ) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
