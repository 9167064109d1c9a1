"""What can go wrong with a checkpoint: one exception for each cause.

Owns the exception types, and what an error of the operating system says of a checkpoint. Imports nothing heavy, so that any process
may use them.
Every message says what, where, and what to do.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from checkpoint import descriptors


class CheckpointError(Exception):
    """A checkpoint could not be written, read or published."""


class DamagedCheckpoint(CheckpointError):
    """The files of a committed checkpoint are not what its manifest says."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}; use an older checkpoint or a copy of this one")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type["DamagedCheckpoint"], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


class UnreachableCheckpoint(DamagedCheckpoint):
    """A part of a checkpoint cannot be had: its node is gone, or the way to it, or it may not be read. It may be sound."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.args = (f"{path} cannot be reached: {reason}",)


AWAY = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH})
"""What a file system says that has lost its servers, or was unmounted: nothing of the files on it."""

PASSING = AWAY | {errno.EIO, errno.EACCES, errno.EPERM, errno.ENOMEM}
"""What may be over in a moment: a server was away (EIO of a soft mount), a ticket has expired, memory was short."""

PAUSES_S = (1.0, 2.0, 4.0)
"""Before a step is tried again that is not damaged, but cannot be reached: a link is down, a daemon is started anew."""


def unreadable(path: Path, name: str, error: OSError) -> CheckpointError:
    """What it means that a file of a committed checkpoint cannot be opened or read.

    Args:
        path: of the checkpoint.
        name: of the file.
    """
    if isinstance(error, FileNotFoundError):
        return DamagedCheckpoint(path, f"{name} is missing")
    if error.errno in (errno.EMFILE, errno.ENFILE):  # which says nothing of the checkpoint
        advice = f"this process may have {descriptors.current()} files open; raise the limit (ulimit -n)"
        return CheckpointError(f"{path / name} cannot be read: {error.strerror}; {advice}")
    kind = UnreachableCheckpoint if error.errno in PASSING else DamagedCheckpoint
    return kind(path, f"{name} cannot be read: {error.strerror}")


def refuse_pipe(path: Path) -> None:
    """Raises OSError where a file of a checkpoint is a named pipe: whoever opens it waits for its other end."""
    if stat.S_ISFIFO(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is a pipe", str(path))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the operating system that name no path, as those of a write do not, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def inodes_told_apart() -> Iterator[None]:
    """A file system without inodes says that no space is left, and `df` shows that there is some: it is told as what it is."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is not None and has_no_inodes(Path(error.filename)):
            raise OSError(errno.ENOSPC, "No inodes are left", error.filename) from error
        raise


def has_no_inodes(path: Path) -> bool:
    """Whether the file system of a path, which need not be there, has none left. Raises OSError."""
    free = os.statvfs(next(each for each in (path, *path.parents) if each.exists()))
    return bool(free.f_files) and not free.f_favail


def in_words(error: OSError) -> str:
    """What is wrong, and where, if that is known."""
    text, place = error.strerror or str(error), str(error.filename or "")
    return text if place in text else f"{text}: {place}"


class CheckpointMismatch(CheckpointError):
    """The checkpoint is sound, but holds something else than what was asked of it."""


class _NoCheckpointLeft(CheckpointError):
    """There are checkpoints, and none of them was used."""

    verdict: ClassVar[str]
    advice: ClassVar[str]

    def __init__(self, root: Path, rejected: Sequence[tuple[int, str]]) -> None:
        listed = "".join(f"\n  step {step}: {reason}" for step, reason in rejected)
        super().__init__(f"none of the {len(rejected)} checkpoints in {root} {self.verdict}:{listed}\n{self.advice}")
        self.root = root
        self.rejected = tuple(rejected)

    def __reduce__(self) -> tuple[type["_NoCheckpointLeft"], tuple[Path, tuple[tuple[int, str], ...]]]:
        return type(self), (self.root, self.rejected)


class NoUsableCheckpoint(_NoCheckpointLeft):
    """There are checkpoints, and none of them is good."""

    verdict = "can be used"
    advice = "restore one of them from a copy, or move them all away to begin again from nothing"


class NoReachableCheckpoint(_NoCheckpointLeft):
    """There are checkpoints; none could be used, and some of them only because nobody answered where they are."""

    verdict = "and in the nodes' memory can be used at present"
    advice = "those that cannot be reached may be sound: start again once their nodes and file systems answer"


class StaleGeneration(CheckpointError):
    """A newer generation has taken over; this process may not publish any more."""

    def __init__(self, root: Path, generation: int, newest: int) -> None:
        super().__init__(
            f"generation {generation} may not publish in {root}: generation {newest} has taken over; "
            "end this process, its successor owns the checkpoints"
        )
        self.root = root
        self.generation = generation
        self.newest = newest

    def __reduce__(self) -> tuple[type["StaleGeneration"], tuple[Path, int, int]]:
        return type(self), (self.root, self.generation, self.newest)
