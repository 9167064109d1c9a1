"""`ckpt prune`: what would go, and deleting it.

Owns the plan that a person agrees to; what goes is then no more than that. Needs neither torch nor Zarr.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoint import manifest
from checkpoint.errors import DamagedCheckpoint
from checkpoint.naming import deleted, step_of, step_path, steps
from checkpoint.pruning import prune
from checkpoint.retention import superseded
from checkpoint.tools.locations import directory, must_be_its_own, tiers
from checkpoint.tools.refusal import WRONG, Refusal


@dataclass(frozen=True)
class Plan:
    """What is to be done in one directory of checkpoints.

    Attributes:
        root: the directory.
        gone: the checkpoints to delete, and what is left of earlier deletions, each with its size in bytes.
        kept: the steps that stay.
    """

    root: Path
    gone: tuple[tuple[Path, int], ...]
    kept: tuple[int, ...]

    @property
    def freed_bytes(self) -> int:
        """That deleting frees."""
        return sum(size for _, size in self.gone)


def plans(path: Path, keep_last: int, keep_every: int | None) -> list[Plan]:
    """What is to be done in the durable tier of a run directory, or in a directory of checkpoints.

    Raises Refusal for numbers below 1, where there is no checkpoint, where none that stays has a sound manifest, and where the
    run directory was copied and its durable tier is that of another.
    """
    for option, number in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if number is not None and number < 1:
            raise Refusal(f"{option} {number}: must be at least 1", WRONG)
    if step_of(directory(path)) is not None:
        raise Refusal(f"{path} is one checkpoint; name the directory that it is in", WRONG)
    durable = [tier for tier in tiers(path) if tier.durable]
    must_be_its_own(path, durable)
    roots = [root for tier in durable for root in tier.roots]
    found = [_plan(root, keep_last, keep_every) for root in roots if root.is_dir()]
    if not any(plan.gone or plan.kept for plan in found):
        raise Refusal(f"there is no checkpoint in {path}")
    return found


def carry_out(plan: Plan, keep_last: int, keep_every: int | None) -> None:
    """Delete. What was committed since the plan was made is neither counted nor deleted. Raises OSError."""
    prune(plan.root, keep_last, keep_every, upto=max(plan.kept, default=None))


def _plan(root: Path, keep_last: int, keep_every: int | None) -> Plan:
    present = steps(root)
    gone = superseded(present, keep_last, keep_every)
    kept = tuple(step for step in present if step not in set(gone))
    if gone and not any(_sound(step_path(root, step)) for step in kept):
        raise Refusal(f"{root}: nothing was deleted, because none of the checkpoints that would stay has a sound manifest: {kept}")
    paths = [*(step_path(root, step) for step in gone), *deleted(root)]
    return Plan(root, tuple((path, _size_bytes(path)) for path in paths), kept)


def _sound(path: Path) -> bool:
    try:
        manifest.read(path)
    except DamagedCheckpoint:
        return False
    return True


def _size_bytes(path: Path) -> int:
    size_bytes = 0
    for inside, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # a campaign that goes on deletes it, too
                size_bytes += os.lstat(Path(inside) / name).st_size
    return size_bytes
