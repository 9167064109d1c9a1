"""Pruning: deleting what is superseded.

Owns deletion. The name goes first, so that nobody opens what is half gone; never deletes the newest checkpoint, nor one that was
set aside.
"""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType

from checkpoint import points
from checkpoint.errors import CheckpointError
from checkpoint.fence import guard
from checkpoint.naming import aside, deleted, step_path, steps
from checkpoint.retention import superseded

_log = logging.getLogger(__name__)


def prune(
    root: Path,
    keep_last: int,
    keep_every: int | None = None,
    *,
    upto: int | None = None,
    generation: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[int]:
    """Delete all checkpoints but the newest `keep_last` and the multiples of `keep_every`; return their steps.

    Args:
        upto: steps above it are neither counted nor deleted.
        generation: refuse if a newer one has taken over; None deletes on a person's behalf.
        progress: called for each file that is deleted.

    Raises StaleGeneration; ValueError unless the numbers are at least 1; OSError where a name cannot be changed.
    """
    gone = superseded(steps(root), keep_last, keep_every, upto)
    delete(root, gone, generation=generation, progress=progress)
    return gone


def delete(root: Path, gone: Sequence[int], *, generation: int | None = None, progress: Callable[[], None] = lambda: None) -> None:
    """Delete the checkpoints of these steps, and what is left of earlier deletions. Arguments and errors as for `prune`."""
    with nullcontext() if generation is None or not gone else guard(root, generation):
        for step in gone:
            path = step_path(root, step)
            with suppress(FileNotFoundError):  # somebody else prunes, too
                path.rename(aside(path, "deleted"))
            points.reached("pruned_by_name")
    for path in deleted(root):
        remove(path, progress)


def prune_behind(
    root: Path,
    step: int,
    keep_last: int,
    keep_every: int | None,
    generation: int,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Prune behind a commit, which is done whatever becomes of that: what cannot be deleted is logged, and left to the next one."""
    try:
        prune(root, keep_last, keep_every, upto=step, generation=generation, progress=progress)
    except (OSError, ValueError, CheckpointError) as error:
        _log.warning("older checkpoints could not be deleted: %s", error)


def remove(path: Path, progress: Callable[[], None] = lambda: None) -> None:
    """Delete a directory that no reader takes for a checkpoint, or a link to one; what cannot be deleted stays, and is logged.

    Args:
        progress: called for each file that is deleted: there may be very many.
    """
    try:
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            _empty(path, progress)
            shutil.rmtree(path, onerror=_unless_gone)  # which says what cannot be deleted
    except OSError as error:
        _log.warning("%s could not be deleted and can be at any time: %s", path, error)
    points.reached("unlinked")


def _empty(path: Path, progress: Callable[[], None]) -> None:
    """Delete what can be deleted of what is in a directory."""
    for directory, inside, files in os.walk(path, topdown=False):
        for name in files:
            with suppress(OSError):
                Path(directory, name).unlink()
            progress()
        for name in inside:
            with suppress(OSError):
                Path(directory, name).rmdir()


def _unless_gone(_function: object, _path: str, error: tuple[type[BaseException], BaseException, TracebackType]) -> None:
    """Go on where somebody else has deleted it first."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]
