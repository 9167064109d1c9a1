"""JSON that files hold, as types: what is not exactly that is refused before anything is computed from it.

Owns the limits of what a file may say of arrays, so that a few bytes cannot ask for much memory. Pure.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from checkpoint import layout
from checkpoint.layout import ArrayInfo
from checkpoint.naming import LAST_STEP
from checkpoint.safe_name import safe_name
from checkpoint.typed import built

T = TypeVar("T")

MOST_SHARDS = 1 << 20
MOST_DIMENSIONS = 64
_LARGEST = 1 << 60

Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
Length = Annotated[int, Meta(ge=1, le=_LARGEST)]
Step = Annotated[int, Meta(ge=0, le=LAST_STEP)]
Generation = Annotated[int, Meta(ge=0, le=1 << 53)]
Nodes = Annotated[int, Meta(ge=1, le=1 << 20)]
Crc = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}\Z")]
Crcs = Annotated[str, Meta(pattern=r"\A([0-9a-f]{8})*\Z")]
Runs = list[tuple[Count, Length]]
"""Stretches of slots [first, count]."""
Lengths = Annotated[list[Count], Meta(max_length=MOST_DIMENSIONS)]
Parts = Annotated[list[Length], Meta(max_length=MOST_DIMENSIONS)]


def parsed(text: bytes | str) -> Any:
    """The JSON in a text. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def converted(found: Any, kind: type[T]) -> T:
    """Parsed JSON as a type. Raises ValueError."""
    try:
        return msgspec.convert(found, built(kind))
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def slots_of(runs: Sequence[tuple[int, int]], count: int) -> Iterable[int]:
    """The numbers in ascending stretches, which are `count` in all; nothing is made of them before that is known.

    Raises ValueError.
    """
    end = total = 0
    for first, length in runs:
        if first < end:
            raise ValueError("its slots are not in order")
        end, total = first + length, total + length
    if total != count:
        raise ValueError(f"{total} slots, and {count} were told of")
    return (slot for first, length in runs for slot in range(first, first + length))


def array_of(name: str, dtype: str, shape: Sequence[int], chunk: Sequence[int], per_shard: Sequence[int]) -> ArrayInfo:
    """An array whose layout is one that `checkpoint.layout` makes. Raises ValueError."""
    info = ArrayInfo(safe_name(name), dtype, tuple(shape), tuple(chunk), tuple(per_shard))
    size = info.element.size_bytes
    if not len(shape) == len(chunk) == len(per_shard):
        raise ValueError(f"array {name} has {len(shape)} dimensions, its chunks {len(chunk)}, its shards {len(per_shard)}")
    for full, part, count in zip(shape, chunk, per_shard, strict=True):
        if full < 0 or not 1 <= part <= max(1, full) or not 1 <= count <= max(1, -(-full // part)):
            raise ValueError(f"array {name} of {list(shape)} cannot have chunks of {list(chunk)}, {list(per_shard)} in a file")
    if size * math.prod(shape) > _LARGEST:
        raise ValueError(f"array {name} of {list(shape)} is too large")
    slots = math.prod(per_shard)
    if slots > 1 and slots * info.slot_bytes > layout.SHARD_LIMIT_BYTES:
        raise ValueError(f"array {name} has {slots} chunks in a file, more than {layout.SHARD_LIMIT_BYTES} bytes")
    return info


def shard_count(info: ArrayInfo) -> int:
    """How many files an array has; none of them is listed for that."""
    return math.prod(-(-length // part) for length, part in zip(info.grid, info.per_shard, strict=True))


def must_be_few(arrays: Iterable[ArrayInfo], files: int | None = None) -> None:
    """Raises ValueError where arrays have more files than are there, or than any checkpoint has.

    Args:
        files: shard files that are there; None where that is not known.
    """
    count = sum(map(shard_count, arrays))
    if count > MOST_SHARDS:
        raise ValueError(f"its arrays have {count} files")
    if files is not None and count != files:
        raise ValueError(f"its arrays have {count} files, and {files} are listed")
