"""Quarantine: committed checkpoints that are not to be gone on from get a name that no reader takes for one.

Owns the rename; deletes nothing. It can be done again and again: what has the name already is left alone.
"""

import time
from collections.abc import Callable
from pathlib import Path

from checkpoint import manifest
from checkpoint.errors import PAUSES_S, DamagedCheckpoint, UnreachableCheckpoint
from checkpoint.fence import fsync_directory, guard
from checkpoint.manifest import Manifest
from checkpoint.naming import aside, step_path, steps


def quarantine(root: Path, invalidated: Callable[[int, int], bool], why: str, *, generation: int) -> list[tuple[int, Path]]:
    """Rename the checkpoints that are invalidated, newest first; returns their steps and what they are called now.

    Args:
        invalidated: whether it is, by its step and the generation that wrote it; what holds of one generation holds of all before.
        why: becomes part of the name.
        generation: on whose behalf; refuse if a newer one has taken over.

    Raises StaleGeneration, OSError; UnreachableCheckpoint where it cannot be read for now who wrote one that may be invalidated:
    nothing is renamed then, and nobody may go on, for it may be read a moment later. One that is damaged is left as it is: whoever
    restores passes it over.
    """
    found = [step_path(root, step) for step in reversed(steps(root)) if invalidated(step, 0)]
    found = [path for path in found if _is_invalidated(path, invalidated)]
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


def _is_invalidated(path: Path, invalidated: Callable[[int, int], bool]) -> bool:
    """Raises UnreachableCheckpoint."""
    try:
        found = _manifest(path)
    except UnreachableCheckpoint as error:
        unknown = "whether it was rolled back is not known: start again once it can be read, or move it away"
        raise UnreachableCheckpoint(path, f"{error.reason}; {unknown}") from error
    except DamagedCheckpoint:
        return False
    return invalidated(found.step, found.generation)


def _manifest(path: Path) -> Manifest:
    """It is tried again as for a restore. Raises DamagedCheckpoint."""
    for pause_s in PAUSES_S:
        try:
            return manifest.read(path)
        except UnreachableCheckpoint:
            time.sleep(pause_s)
    return manifest.read(path)
