"""Writing a file or directory so that it appears whole or not at all.

Owns the names in between, and what may be replaced.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint.naming import step_of
from checkpoint.tools.refusal import WRONG, Refusal

_EXPORTS = ("zarr.json", "config.json")  # what a directory that was exported holds
_CHECKPOINT = "manifest.json"


def check(output: Path, *, force: bool) -> Path:
    """The absolute path of what is to be written. Raises Refusal where it may not be.

    Args:
        output: file or directory to be.
        force: replace a file, an empty directory or an earlier export; never a checkpoint, nor what contains other things.
    """
    output = Path(os.path.abspath(output))  # noqa: PTH100  (a link is replaced, not followed)
    if any(step_of(parent) is not None for parent in (output.resolve(), *output.resolve().parents)):
        raise Refusal(f"{output} is in a checkpoint, or is called like one; choose another place", WRONG)
    if not os.path.lexists(output):
        return output
    if not force:
        raise Refusal(f"{output} is there already; --force replaces it", WRONG)
    if output.is_dir() and not output.is_symlink():
        names = {path.name for path in output.iterdir()}
        if names and (_CHECKPOINT in names or not names.intersection(_EXPORTS)):
            raise Refusal(f"{output} is no export, and is not replaced; delete it, or choose another place", WRONG)
    return output


@contextmanager
def appearing(output: Path, *, force: bool) -> Iterator[Path]:
    """Give a path beside `output` to write to, a file or a directory; it becomes `output` if nothing is raised, durably.

    Raises Refusal as `check`, and OSError.
    """
    output = check(output, force=force)
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        yield beside
        _sync(beside)
        check(output, force=force)
        _replace(beside, output)
    finally:
        _remove(beside)


def _replace(new: Path, output: Path) -> None:
    if not output.is_dir() or output.is_symlink():
        if new.is_dir() and os.path.lexists(output):
            output.unlink()
        new.replace(output)
    else:
        old = output.with_name(f".{output.name}.{os.getpid()}.old")
        output.rename(old)
        try:
            new.rename(output)
        except OSError:
            old.rename(output)
            raise
        _remove(old)
    _sync_one(output.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for inside, _, names in os.walk(path):
        for name in names:
            _sync_one(Path(inside) / name)
        _sync_one(Path(inside))
    if path.is_file():
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
