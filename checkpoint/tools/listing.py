"""`ckpt ls`: what is where, from manifests alone.

Owns what is said of each checkpoint. Changes nothing; needs neither torch nor Zarr.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from checkpoint import manifest
from checkpoint.errors import DamagedCheckpoint
from checkpoint.naming import may_be_directory
from checkpoint.tools.locations import NODE_SHARD, CheckpointLocation, broken_links, is_node_shard, is_there, locations, tiers


@dataclass(frozen=True)
class Entry:
    """One directory `step-N`. What cannot be known is None.

    Attributes:
        tier: the tier's name.
        durable: what is there survives the nodes.
        path: of the directory.
        step: that it is of.
        generation: that wrote it.
        size_bytes: of all files but the manifest.
        files: how many, the manifest among them.
        age_s: seconds since it was committed.
        state: `committed`, `part` of one node, or `damaged`.
        reason: what is wrong with a damaged one.
        node: that holds the part.
        nodes: that hold the whole checkpoint together.
        verified: whether every byte is as it was written; None where nobody looked.
        link: where the name leads, if it is a symbolic link.
    """

    tier: str | None
    durable: bool | None
    path: str
    step: int
    generation: int | None
    size_bytes: int | None
    files: int | None
    age_s: float | None
    state: Literal["committed", "part", "damaged"]
    reason: str | None = None
    node: int | None = None
    nodes: int | None = None
    verified: bool | None = None
    link: str | None = None


def entries(path: Path) -> list[Entry]:
    """All that a path means, by tier, root and step. Raises Refusal."""
    found, broken = locations(path), broken_links(path)
    if broken:
        order = {root: number for number, root in enumerate(root for tier in tiers(path) for root in tier.roots)}
        found = sorted([*found, *broken], key=lambda place: (order[place.path.parent], place.step))
    return list(_entries(found, time.time()))


def verified(entry: Entry, progress: Callable[[int], None] | None = None) -> Entry:
    """The entry after reading every byte; one that is not committed comes back as it is."""
    from checkpoint.verification import verify

    if entry.state != "committed":
        return entry
    try:
        verify(Path(entry.path), progress=progress)
    except DamagedCheckpoint as error:
        return replace(entry, state="damaged", reason=error.reason, verified=False)
    return replace(entry, verified=True)


def _entries(found: list[CheckpointLocation], now: float) -> Iterator[Entry]:
    for place in found:
        tier, durable = (None, None) if place.tier is None else (place.tier.name, place.tier.durable)
        link = _target(place.path)
        lost = link is not None and not may_be_directory(place.path)
        try:
            age_s = _age_s(place.path, now, of_link=lost)
        except FileNotFoundError:  # a campaign that goes on deletes what is superseded
            continue
        blank = Entry(tier, durable, str(place.path), place.step, None, None, None, age_s, "damaged", link=link)
        if lost:
            yield replace(blank, reason="there is no directory where it leads")
            continue
        entry = _node_shard(place.path, blank) if is_node_shard(place.path) else _whole(place.path, blank)
        if entry.state != "damaged" or is_there(place):
            yield entry


def _age_s(path: Path, now: float, *, of_link: bool) -> float | None:
    """Since when it is there; None where it cannot be looked at. Raises FileNotFoundError."""
    try:
        return max(0.0, now - (path.lstat() if of_link else path.stat()).st_mtime)
    except FileNotFoundError:
        raise
    except OSError:
        return None


def _target(path: Path) -> str | None:
    """Where a symbolic link leads; None for anything else."""
    try:
        return str(path.readlink())
    except OSError:
        return None


def _whole(path: Path, blank: Entry) -> Entry:
    try:
        found = manifest.read(path)
    except DamagedCheckpoint as error:
        return replace(blank, reason=error.reason)
    size, files = found.size_bytes, len(found.files) + 1
    return replace(blank, state="committed", generation=found.generation, size_bytes=size, files=files)


def _node_shard(path: Path, blank: Entry) -> Entry:
    try:
        found: dict[str, Any] = json.loads((path / NODE_SHARD).read_bytes())
        files = found["files"]
        return replace(
            blank,
            state="part",
            generation=int(found["generation"]),
            size_bytes=int(found["size_bytes"]),
            files=files if isinstance(files, int) else len(files),
            node=int(found["node"]),
            nodes=int(found["nodes"]),
        )
    except OSError as error:
        return replace(blank, reason=f"{NODE_SHARD} cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return replace(blank, reason=f"{NODE_SHARD} is not what a node writes: {error!r}")
