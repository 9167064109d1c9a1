"""The blueprint: which bytes the ranks of one node write, where.

Written by the workers, once for each layout; the snapshot daemon makes buffers from it. JSON, so that neither needs the other's
libraries.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from checkpoint.described import Lengths, Parts, Runs, array_of, converted, must_be_few, parsed, slots_of
from checkpoint.layout import ArrayInfo, Shard
from checkpoint.runs import runs
from checkpoint.safe_name import metadata_name, safe_name

Described = tuple[str, str, Lengths, Parts, Parts]
"""Name, type, shape, chunk, chunks in a file."""


_HALF = 16


class _Common(msgspec.Struct):
    """`arrays-<digest>.json`."""

    arrays: list[Described]
    documents: dict[str, str]


class _Slots(msgspec.Struct):
    """`slots-rank<r>.json`."""

    generation: int
    digest: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    slots: dict[str, Runs]
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class Blueprint:
    """Arrays, metadata, and this node's slots.

    Attributes:
        arrays: all of the checkpoint's, sorted by name.
        documents: text of every metadata file by its path; the root's without the attributes of a step.
        slots: that the ranks of this node write, by shard file, ascending.
        place: number of this node's shard, and how many shards there are, where several nodes hold the same one; None: each
            node has one of its own.
    """

    arrays: Sequence[ArrayInfo]
    documents: Mapping[str, str]
    slots: Mapping[str, Sequence[int]]
    place: tuple[int, int] | None = None

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """All shard files by path."""
        return {shard.path: shard for info in self.arrays for shard in info.shards.values()}

    @cached_property
    def size_bytes(self) -> int:
        """Of this node's slots."""
        return sum(len(slots) * self.shards[path].array.slot_bytes for path, slots in self.slots.items())

    @cached_property
    def digest(self) -> str:
        """Two blueprints that make the same buffers have the same; see `is_of`."""
        slots = {path: runs(each) for path, each in sorted(self.slots.items())}
        return arrays_digest(self.arrays)[:_HALF] + hashlib.sha256(json.dumps(slots).encode()).hexdigest()[:_HALF]

    def stretches(self, path: str) -> list[list[int]]:
        """This node's slots of a shard file as [first, count]."""
        return runs(self.slots[path])


def describe(arrays: Iterable[ArrayInfo]) -> list[Any]:
    """Arrays as JSON."""
    return [[info.name, info.dtype, list(info.shape), list(info.chunk), list(info.per_shard)] for info in arrays]


def arrays_digest(arrays: Iterable[ArrayInfo]) -> str:
    """Tells layouts of arrays apart."""
    return hashlib.sha256(json.dumps(describe(arrays)).encode()).hexdigest()[:32]


def is_of(digest: str, arrays: str) -> bool:
    """Whether a blueprint with this digest is of arrays with that one."""
    return digest[:_HALF] == arrays[:_HALF]


def arrays_of(found: Sequence[Described]) -> list[ArrayInfo]:
    """What `describe` gave. Raises ValueError where no array is laid out so."""
    arrays = [array_of(name, dtype, shape, chunk, per) for name, dtype, shape, chunk, per in found]
    must_be_few(arrays)
    return arrays


def write_arrays(directory: Path, arrays: Sequence[ArrayInfo], documents: Mapping[str, bytes]) -> None:
    """The common half: arrays and metadata. Raises OSError."""
    text = {"arrays": describe(arrays), "documents": {path: each.decode() for path, each in documents.items()}}
    _put(arrays_path(directory, arrays_digest(arrays)), json.dumps(text))


def arrays_path(directory: Path, digest: str) -> Path:
    """Where the common half lies."""
    return directory / f"arrays-{safe_name(digest)}.json"


def slots_digest(slots: Mapping[str, Sequence[int]]) -> str:
    """Ranks that write the same have the same."""
    return hashlib.sha256(json.dumps({name: runs(sorted(each)) for name, each in sorted(slots.items())}).encode()).hexdigest()[:32]


def places(digests: Sequence[str], ranks: int) -> list[tuple[int, int] | None]:
    """`Blueprint.place` of each node, from what each rank writes, and how many ranks a node has. Pure."""
    nodes = [tuple(digests[first : first + ranks]) for first in range(0, len(digests), ranks)]
    numbers = {each: number for number, each in enumerate(dict.fromkeys(nodes))}
    return [(numbers[each], len(numbers)) for each in nodes] if len(numbers) < len(nodes) else [None] * len(nodes)


def write_slots(
    directory: Path,
    rank: int,
    generation: int,
    digest: str,
    slots: Mapping[str, Sequence[int]],
    place: tuple[int, int] | None = None,
) -> None:
    """One rank's half: the slots that it writes, of the arrays with this digest. Raises OSError.

    Args:
        place: of its node; see `Blueprint`.
    """
    stretches = {name: runs(sorted(each)) for name, each in slots.items()}
    _put(
        _slots_path(directory, rank),
        json.dumps({"generation": generation, "digest": digest, "slots": stretches, "place": place}),
    )


class Announced(NamedTuple):
    """What a rank has announced: its generation, and the digest of the arrays that its slots are of."""

    generation: int
    digest: str


def announced(directory: Path, rank: int) -> Announced | None:
    """What a rank wrote last, None if it never did."""
    try:
        found = converted(parsed(_slots_path(directory, rank).read_bytes()), _Slots)
    except (OSError, ValueError):
        return None
    return Announced(found.generation, found.digest)


class LayoutChanged(ValueError):
    """A rank has written down other arrays than those that are asked for."""


def read(directory: Path, digest: str, ranks: Iterable[int]) -> Blueprint:
    """Put the halves together. Raises OSError, ValueError."""
    mine: dict[str, set[int]] = {}
    place: tuple[int, int] | None = None
    try:
        common = converted(parsed(arrays_path(directory, digest).read_bytes()), _Common)
        documents = {metadata_name(name): text for name, text in common.documents.items()}
        found = Blueprint(arrays_of(common.arrays), documents, {})
        for rank in ranks:
            own = converted(parsed(_slots_path(directory, rank).read_bytes()), _Slots)
            if own.digest != digest:
                raise LayoutChanged(f"rank {rank} writes other arrays")
            place = _checked(own.place)
            for name, stretches in own.slots.items():
                mine.setdefault(name, set()).update(_within(found.shards, name, stretches))
    except LayoutChanged:
        raise
    except ValueError as error:
        raise ValueError(f"{directory} holds no blueprint: {error}") from error
    return replace(found, slots={name: sorted(each) for name, each in sorted(mine.items())}, place=place)


def _checked(place: tuple[int, int] | None) -> tuple[int, int] | None:
    """Raises ValueError."""
    if place is not None and not 0 <= place[0] < place[1]:
        raise ValueError(f"there is no shard {place[0]} of {place[1]}")
    return place


def _within(shards: Mapping[str, Shard], name: str, stretches: Sequence[tuple[int, int]]) -> Iterable[int]:
    """Slots of a shard file, which has them. Raises ValueError."""
    if name not in shards:
        raise ValueError(f"{name!r:.80} is no shard file of its arrays")
    last = shards[name].slots[-1]
    if any(first + count - 1 > last for first, count in stretches):
        raise ValueError(f"{name} has no slots beyond {last}")
    return slots_of(stretches, sum(count for _, count in stretches))


def _slots_path(directory: Path, rank: int) -> Path:
    return directory / f"slots-rank{rank}.json"


def _put(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    try:
        new.write_text(text)
    except OSError:
        new.unlink(missing_ok=True)  # what there was room for
        raise
    new.replace(path)
