"""`ckpt prune`: what would go, and deleting it.

Owns the plan that a person agrees to; what goes is then no more than that. Counts those alone of which every byte is as it was
written: a campaign goes on from no other. Needs neither torch nor Zarr.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpoint.errors import DamagedCheckpoint
from checkpoint.naming import deleted, step_of, step_path, steps
from checkpoint.pruning import delete
from checkpoint.retention import superseded
from checkpoint.tools.bar import bar
from checkpoint.tools.locations import directory, must_be_its_own, tiers
from checkpoint.tools.refusal import WRONG, Refusal
from checkpoint.tools.verifying import size_bytes
from checkpoint.verification import verify


@dataclass(frozen=True)
class Plan:
    """What is to be done in one directory of checkpoints.

    Attributes:
        root: the directory.
        gone: the checkpoints to delete, and what is left of earlier deletions, each with its size in bytes.
        kept: the steps that stay.
        damaged: steps that stay, too, and do not count, each with what is wrong.
    """

    root: Path
    gone: tuple[tuple[Path, int], ...]
    kept: tuple[int, ...]
    damaged: Mapping[int, str]

    @property
    def freed_bytes(self) -> int:
        """That deleting frees."""
        return sum(size for _, size in self.gone)


def plans(path: Path, keep_last: int, keep_every: int | None) -> list[Plan]:
    """What is to be done in the durable tier of a run directory, or in a directory of checkpoints.

    Reads every byte of the newest ones, if any is superseded: until as many are sound as are to be kept.

    Raises Refusal for numbers below 1, where there is no checkpoint, where some are superseded and none is sound, and where the
    run directory was copied and its durable tier is that of another; CheckpointError, OSError.
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
    if not any(plan.gone or plan.kept or plan.damaged for plan in found):
        raise Refusal(f"there is no checkpoint in {path}")
    return found


def carry_out(plan: Plan, keep_last: int, keep_every: int | None) -> None:
    """Delete. What was committed since the plan was made is neither counted nor deleted. Raises OSError."""
    present = set(steps(plan.root)) - plan.damaged.keys()
    agreed = {step_of(path) for path, _ in plan.gone}
    gone = superseded(present, keep_last, keep_every, upto=max(plan.kept, default=None))
    delete(plan.root, [step for step in gone if step in agreed])


def _plan(root: Path, keep_last: int, keep_every: int | None) -> Plan:
    present, damaged = steps(root), dict[int, str]()
    if superseded(present, keep_last, keep_every):
        sound = 0
        for step in reversed(present):
            if sound == keep_last:
                break
            wrong = _wrong(step_path(root, step))
            if wrong is None:
                sound += 1
            else:
                damaged[step] = wrong
        if not sound:
            raise Refusal(f"{root}: nothing was deleted, because none of its checkpoints is sound: {', '.join(map(str, present))}")
    present = [step for step in present if step not in damaged]
    gone = superseded(present, keep_last, keep_every)
    paths = [*(step_path(root, step) for step in gone), *deleted(root)]
    kept = tuple(step for step in present if step not in set(gone))
    there = {step: wrong for step, wrong in sorted(damaged.items()) if os.path.lexists(step_path(root, step))}
    return Plan(root, tuple((path, _size_bytes(path)) for path in paths), kept, there)


def _wrong(path: Path) -> str | None:
    """What is wrong with a checkpoint, if something is, or it is not there any more. Raises CheckpointError."""
    try:
        with bar(f"verifying {path.name}", size_bytes(path)) as progress:
            verify(path, progress=progress)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def _size_bytes(path: Path) -> int:
    size_bytes = 0
    for inside, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # a campaign that goes on deletes it, too
                size_bytes += os.lstat(Path(inside) / name).st_size
    return size_bytes
