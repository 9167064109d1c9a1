"""What the entries of a directory of checkpoints are called.

Owns the names. A committed checkpoint is called `step-<8 digits>` and nothing else is: what is being written, was set aside
or is being deleted has another name, so that no reader takes it for one. Changes nothing on disk.
"""

import os
import re
from pathlib import Path

LAST_STEP = 99_999_999

_STEP = re.compile(r"step-(\d{8})")
UNFINISHED = ".tmp"  # behind the name of a directory that a node copies a shard into
_TEMPORARY = re.compile(r"step-(\d{8})\.g(\d+)\.tmp")
_DELETED = re.compile(r"step-\d{8}\.deleted-\d+")


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is. Raises ValueError for a step that has no name (negative, or above 8 digits)."""
    if not 0 <= step <= LAST_STEP:
        raise ValueError(f"a step is a number from 0 to {LAST_STEP}, not {step}")
    return root / f"step-{step:08d}"


def temporary_path(root: Path, step: int, generation: int) -> Path:
    """Where a generation writes the checkpoint of a step. Raises ValueError as `step_path`, or for a negative generation."""
    if generation < 0:
        raise ValueError(f"a generation is a number from 0 on, not {generation}")
    return root / f"{step_path(root, step).name}.g{generation}.tmp"


def step_of(path: Path) -> int | None:
    """The step of a committed checkpoint, None for a path of any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def steps(root: Path) -> list[int]:
    """The committed steps, ascending; none where there is no such directory. Raises OSError if it cannot be read.

    One that cannot be looked at is among them: whoever reads it is told why.
    """
    return sorted(int(match[1]) for path, match in _named(root, _STEP) if may_be_directory(path))


def stale(root: Path, generation: int, before: int = 0) -> list[Path]:
    """Unfinished checkpoints that nobody will finish: those of older generations.

    Args:
        before: this step those of this generation are stale too, for it goes on to newer ones.
    """
    found = [(path, (int(match[2]), int(match[1]))) for path, match in _named(root, _TEMPORARY)]
    return [path for path, written in found if written < (generation, before) and _is_directory(path)]


def deleted(root: Path) -> list[Path]:
    """Checkpoints whose deletion has begun."""
    return [path for path, _ in _named(root, _DELETED) if _is_directory(path)]


def aside(path: Path, why: str) -> Path:
    """A free name beside a checkpoint, `step-<8 digits>.<why>-<k>`, that no reader takes for one."""
    number = 1
    while os.path.lexists(other := path.with_name(f"{path.name}.{why}-{number}")):
        number += 1
    return other


def may_be_directory(path: Path) -> bool:
    """Whether it is a directory, or cannot be looked at: its file system is broken, or the link to it is."""
    try:
        return path.is_dir()
    except OSError:
        return True


def _named(root: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """What has such a name, whatever else is there; nothing where there is no such directory. Raises OSError."""
    try:
        return [(path, match) for path in root.iterdir() if (match := pattern.fullmatch(path.name))]
    except FileNotFoundError:
        return []


def _is_directory(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 (it raises)
