"""Where checkpoints are: what a path on the command line means.

Owns the reading of a run directory: its storage tiers, and the checkpoints in them. Changes nothing; needs neither torch nor Zarr.

`storage.json` names the run directory that it was written for. Where that is another one than was named, this one was copied or
moved: what lay inside of it is looked for here, and what lies outside may be in use by the other.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import manifest
from checkpoint.naming import may_be_directory, step_of, step_path, steps
from checkpoint.tools.refusal import WRONG, Refusal

STORAGE = "storage.json"
NODE_SHARD = "part.json"
"""In the place of a manifest: the directory is what one node holds of a checkpoint."""


@dataclass(frozen=True)
class Tier:
    """One kind of storage.

    Attributes:
        name: of the tier.
        durable: what is there survives the nodes.
        roots: directories of checkpoints; in other tiers than the durable one each is a node's, and may be another machine's.
        other: the run directory that this one was copied from, where some of the roots lie outside of this one.
    """

    name: str
    durable: bool
    roots: tuple[Path, ...]
    other: Path | None = None


@dataclass(frozen=True)
class CheckpointLocation:
    """A directory `step-N`; `tier` is None where it was named itself."""

    tier: Tier | None
    step: int
    path: Path


def tiers(path: Path) -> list[Tier]:
    """The tiers of a run directory or of a directory of checkpoints. Raises Refusal where there is neither."""
    path = directory(path)
    described = path / STORAGE
    if described.is_file():
        try:
            found: dict[str, Any] = json.loads(described.read_bytes())
            written_for = found.get("run_dir")  # None: an earlier version has written it
            other = None if written_for is None or _same(Path(written_for), path) else Path(written_for)
            return [_tier(tier, path, other) for tier in found["tiers"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refusal(f"{described} does not describe storage tiers: {error!r}; name a directory of checkpoints") from error
    inside = path / "checkpoints"
    return [Tier("durable", True, (inside if inside.is_dir() else path,))]


def locations(path: Path) -> list[CheckpointLocation]:
    """Every directory `step-N` that a path means, parts and damaged ones among them, by tier, root and step. Raises Refusal.

    What a node is just writing or removing is left out, and so are the directories of nodes that may not be read (`not_readable`).
    """
    path = directory(path)
    step = step_of(path)
    if step is not None:
        return [CheckpointLocation(None, step, path)]
    found = (
        CheckpointLocation(tier, step, step_path(root, step))
        for tier in tiers(path)
        for root in tier.roots
        for step in _steps(tier, root) or []
    )
    return [place for place in found if is_there(place)]


def broken_links(path: Path) -> list[CheckpointLocation]:
    """Links with a checkpoint's name that lead to no directory: nobody reads them, and a person may expect a checkpoint there.

    Raises Refusal.
    """
    path = directory(path)
    if step_of(path) is not None:
        return []
    return [
        CheckpointLocation(tier, step, link)
        for tier in tiers(path)
        if tier.durable
        for root in tier.roots
        for link in (root.iterdir() if root.is_dir() else ())
        if (step := step_of(link)) is not None and link.is_symlink() and not may_be_directory(link)
    ]


def one(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run directory or a directory of checkpoints.

    Raises Refusal where there is none.
    """
    found = [place for place in locations(path) if is_whole(place)]
    if found:
        return max(found, key=lambda place: place.step).path
    if step_of(directory(path)) is not None:
        raise Refusal(f"{path} is what one node holds of a checkpoint; name a whole one, or the run directory", WRONG)
    raise Refusal(f"there is no checkpoint in {path}")


def is_there(place: CheckpointLocation) -> bool:
    """Whether there is something to be read. A campaign deletes what is superseded, on nodes' tiers file by file."""
    if place.tier is None or place.tier.durable:
        return may_be_directory(place.path)
    return any(_is_file(place.path / name) for name in (NODE_SHARD, manifest.NAME))


def is_whole(place: CheckpointLocation) -> bool:
    """Whether it is a checkpoint, be it damaged, and not what one node holds; that has a manifest only if it holds all."""
    if place.tier is None or place.tier.durable:
        return not is_node_shard(place.path)
    return _is_file(place.path / manifest.NAME)


def is_node_shard(path: Path) -> bool:
    """Whether a directory `step-N` is what one node holds; False where it cannot be read."""
    return _is_file(path / NODE_SHARD) and not os.path.exists(path / manifest.NAME)  # noqa: PTH110 (it raises)


def _is_file(path: Path) -> bool:
    """Whether there is a file; False where that cannot be read."""
    return os.path.isfile(path)  # noqa: PTH113 (it raises)


def directory(path: Path) -> Path:
    """The path without links. Raises Refusal where there is no directory."""
    if not path.is_dir():
        raise Refusal(f"{path} is not a directory")
    return path.resolve()


def must_be_its_own(path: Path, found: Iterable[Tier]) -> None:
    """Raises Refusal where tiers that are to be changed may be in use by the run directory that `path` was copied from."""
    for tier in found:
        if tier.other is not None:
            raise Refusal(
                f"{path} was copied from {tier.other}, and {tier.roots[0]} lies outside of it: nothing was changed there; "
                f"name {tier.other}",
                WRONG,
            )


def read_of_another(path: Path) -> list[str]:
    """What to say of each tier that is read, but is outside of a run directory that was copied. Raises Refusal."""
    path = directory(path)
    return [
        f"{path} was copied from {tier.other}; tier {tier.name} is what {root} holds, outside of it"
        for tier in ([] if step_of(path) is not None else tiers(path))
        for root in tier.roots[:1]
        if tier.other is not None and any(os.path.isdir(each) for each in tier.roots)  # noqa: PTH112 (nor may it be readable)
    ]


def not_readable(path: Path) -> list[str]:
    """What to say of each tier of which directories of nodes may not be read: they are their user's alone. Raises Refusal."""
    path = directory(path)
    return [
        f"{len(denied)} directories of nodes were left out, of tier {tier.name}: {denied[0]} may not be read"
        for tier in ([] if step_of(path) is not None else tiers(path))
        if (denied := [root for root in tier.roots if _steps(tier, root) is None])
    ]


def _steps(tier: Tier, root: Path) -> list[int] | None:
    """The committed steps; None for a node's directory that may not be read. Raises OSError."""
    try:
        return steps(root)
    except PermissionError:
        if tier.durable:
            raise
        return None


def _tier(described: dict[str, Any], path: Path, other: Path | None) -> Tier:
    """A tier of `storage.json`. Args: other: the run directory that it was written for, if that is not `path`."""
    roots = tuple(path / root for root in described["roots"])
    if other is None:
        return Tier(str(described["name"]), bool(described["durable"]), roots)
    roots = tuple(_moved(root, other, path) for root in roots)
    copied = os.path.lexists(other / STORAGE)  # else it was moved, and what lies outside is still its own
    outside = any(not root.resolve().is_relative_to(path) for root in roots)  # a link may lead there, too
    return Tier(str(described["name"]), bool(described["durable"]), roots, other if copied and outside else None)


def _moved(root: Path, other: Path, path: Path) -> Path:
    """Where a directory is that lay in the run directory `other`, now that this one is at `path`; `root` if it lay elsewhere."""
    for inside, above in ((root, other), (root.resolve(), other.resolve())):
        if inside.is_relative_to(above):
            return path / inside.relative_to(above)
    return root


def _same(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except OSError:
        return False
