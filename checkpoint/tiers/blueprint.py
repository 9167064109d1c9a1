"""The blueprint: which bytes the ranks of one node write, where.

Written by the workers, once for each layout; the snapshot daemon makes buffers from it. JSON, so that neither needs the other's
libraries.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint.layout import ArrayInfo, Shard
from checkpoint.runs import runs


@dataclass(frozen=True)
class Blueprint:
    """Arrays, metadata, and this node's slots.

    Attributes:
        arrays: all of the checkpoint's, sorted by name.
        documents: text of every metadata file by its path; the root's without the attributes of a step.
        slots: that the ranks of this node write, by shard file, ascending.
    """

    arrays: Sequence[ArrayInfo]
    documents: Mapping[str, str]
    slots: Mapping[str, Sequence[int]]

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
        """Two blueprints that make the same buffers have the same."""
        slots = {path: runs(each) for path, each in sorted(self.slots.items())}
        return hashlib.sha256(json.dumps([describe(self.arrays), slots]).encode()).hexdigest()[:32]

    def stretches(self, path: str) -> list[list[int]]:
        """This node's slots of a shard file as [first, count]."""
        return runs(self.slots[path])


def describe(arrays: Iterable[ArrayInfo]) -> list[Any]:
    """Arrays as JSON."""
    return [[info.name, info.dtype, list(info.shape), list(info.chunk), list(info.per_shard)] for info in arrays]


def arrays_digest(arrays: Iterable[ArrayInfo]) -> str:
    """Tells layouts of arrays apart."""
    return hashlib.sha256(json.dumps(describe(arrays)).encode()).hexdigest()[:32]


def arrays_of(described: Sequence[Any]) -> list[ArrayInfo]:
    """What `describe` gave."""
    return [ArrayInfo(name, dtype, tuple(shape), tuple(chunk), tuple(per)) for name, dtype, shape, chunk, per in described]


def write_arrays(directory: Path, arrays: Sequence[ArrayInfo], documents: Mapping[str, bytes]) -> None:
    """The common half: arrays and metadata. Raises OSError."""
    text = {"arrays": describe(arrays), "documents": {path: each.decode() for path, each in documents.items()}}
    _put(arrays_path(directory, arrays_digest(arrays)), json.dumps(text))


def arrays_path(directory: Path, digest: str) -> Path:
    """Where the common half lies."""
    return directory / f"arrays-{digest}.json"


def write_slots(directory: Path, rank: int, generation: int, digest: str, slots: Mapping[str, Sequence[int]]) -> None:
    """One rank's half: the slots that it writes, of the arrays with this digest. Raises OSError."""
    stretches = {name: runs(sorted(each)) for name, each in slots.items()}
    _put(_slots_path(directory, rank), json.dumps({"generation": generation, "digest": digest, "slots": stretches}))


class Announced(NamedTuple):
    """What a rank has announced: its generation, and the digest of the arrays that its slots are of."""

    generation: int
    digest: str


def announced(directory: Path, rank: int) -> Announced | None:
    """What a rank wrote last, None if it never did."""
    try:
        found = json.loads(_slots_path(directory, rank).read_bytes())
        return Announced(int(found["generation"]), str(found["digest"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read(directory: Path, digest: str, ranks: Iterable[int]) -> Blueprint:
    """Put the halves together. Raises OSError, ValueError."""
    mine: dict[str, set[int]] = {}
    try:
        common = json.loads(arrays_path(directory, digest).read_bytes())
        for rank in ranks:
            for name, stretches in json.loads(_slots_path(directory, rank).read_bytes())["slots"].items():
                mine.setdefault(name, set()).update(slot for first, count in stretches for slot in range(first, first + count))
        slots = {name: sorted(each) for name, each in sorted(mine.items())}
        return Blueprint(arrays_of(common["arrays"]), common["documents"], slots)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory} holds no blueprint: {error}") from error


def _slots_path(directory: Path, rank: int) -> Path:
    return directory / f"slots-rank{rank}.json"


def _put(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
