"""Quarantine: committed checkpoints that are not to be gone on from get a name that no reader takes for one.

Owns the rename; deletes nothing. It can be done again and again: what has the name already is left alone.
"""

from collections.abc import Callable
from pathlib import Path

from checkpoint import manifest
from checkpoint.errors import DamagedCheckpoint
from checkpoint.fence import fsync_directory, guard
from checkpoint.naming import aside, step_path, steps


def quarantine(root: Path, invalidated: Callable[[int, int], bool], why: str, *, generation: int) -> list[tuple[int, Path]]:
    """Rename the checkpoints that are invalidated, newest first; returns their steps and what they are called now.

    Args:
        invalidated: whether it is, by its step and the generation that wrote it.
        why: becomes part of the name.
        generation: on whose behalf; refuse if a newer one has taken over.

    Raises StaleGeneration, OSError. A checkpoint that cannot be read is left to whoever restores.
    """
    found = [step_path(root, step) for step in reversed(steps(root)) if invalidated(step, _generation(step_path(root, step)))]
    if not found:
        return []
    renamed = []
    with guard(root, generation):
        for path in found:
            other = aside(path, why)
            path.rename(other)
            renamed.append((int(path.name.removeprefix("step-")), other))
        fsync_directory(root)
    return renamed


def _generation(path: Path) -> int:
    try:
        return manifest.read(path).generation
    except DamagedCheckpoint:
        return -1
