"""Where checkpoints are: what a path on the command line means.

Owns the reading of a run directory: its storage tiers, and the checkpoints in them. Changes nothing; needs neither torch nor Zarr.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from checkpoint import manifest
from checkpoint.naming import step_of, step_path, steps
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
    """

    name: str
    durable: bool
    roots: tuple[Path, ...]


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
            return [
                Tier(str(tier["name"]), bool(tier["durable"]), tuple(path / root for root in tier["roots"]))
                for tier in json.loads(described.read_bytes())["tiers"]
            ]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refusal(f"{described} does not describe storage tiers: {error!r}; name a directory of checkpoints") from error
    inside = path / "checkpoints"
    return [Tier("durable", True, (inside if inside.is_dir() else path,))]


def locations(path: Path) -> list[CheckpointLocation]:
    """Every directory `step-N` that a path means, parts and damaged ones among them, by tier, root and step. Raises Refusal.

    What a node is just writing or removing is left out.
    """
    path = directory(path)
    step = step_of(path)
    if step is not None:
        return [CheckpointLocation(None, step, path)]
    found = (
        CheckpointLocation(tier, step, step_path(root, step)) for tier in tiers(path) for root in tier.roots for step in steps(root)
    )
    return [place for place in found if is_there(place)]


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
        return place.path.is_dir()
    return any((place.path / name).is_file() for name in (NODE_SHARD, manifest.NAME))


def is_whole(place: CheckpointLocation) -> bool:
    """Whether it is a checkpoint, be it damaged, and not what one node holds; that has a manifest only if it holds all."""
    if place.tier is None or place.tier.durable:
        return not is_node_shard(place.path)
    return (place.path / manifest.NAME).is_file()


def is_node_shard(path: Path) -> bool:
    """Whether a directory `step-N` is what one node holds."""
    return (path / NODE_SHARD).is_file() and not (path / manifest.NAME).exists()


def directory(path: Path) -> Path:
    """The path without links. Raises Refusal where there is no directory."""
    if not path.is_dir():
        raise Refusal(f"{path} is not a directory")
    return path.resolve()
