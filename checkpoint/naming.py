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
    """The committed steps, ascending; none where there is no such directory. Raises OSError if it cannot be read."""
    return sorted(step for path in _directories(root) if (step := step_of(path)) is not None)


def stale(root: Path, generation: int, before: int = 0) -> list[Path]:
    """Unfinished checkpoints that nobody will finish: those of older generations.

    Args:
        before: this step those of this generation are stale too, for it goes on to newer ones.
    """
    found = ((path, _TEMPORARY.fullmatch(path.name)) for path in _directories(root))
    return [path for path, match in found if match and (int(match[2]), int(match[1])) < (generation, before)]


def deleted(root: Path) -> list[Path]:
    """Checkpoints whose deletion has begun."""
    return [path for path in _directories(root) if _DELETED.fullmatch(path.name)]


def aside(path: Path, why: str) -> Path:
    """A free name beside a checkpoint, `step-<8 digits>.<why>-<k>`, that no reader takes for one."""
    number = 1
    while os.path.lexists(other := path.with_name(f"{path.name}.{why}-{number}")):
        number += 1
    return other


def _directories(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
