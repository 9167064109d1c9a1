"""The plan of a save: one layout for every array, from what all ranks say they hold.

Owns the agreement of all shard specs: that shapes and types are the same everywhere, that the blocks fill each array without gap
or overlap, and that of each block's replicas every one is there once. Pure; knows neither torch nor files.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from checkpoint.errors import CheckpointError
from checkpoint.layout import ArrayInfo, ChunkRun, Shape, arrange


@dataclass(frozen=True)
class ShardSpec:
    """A local shard without its data: what one rank reports to hold."""

    array: str
    dtype: str
    shape: Shape
    offset: Shape
    extent: Shape
    unit: Shape
    replica: int
    replicas: int
    copy: int = 0
    copies: int = 1

    @property
    def for_snapshots(self) -> "ShardSpec":
        """The same as if there were no other copy: all of the block is written."""
        return replace(self, copy=0, copies=1)


def plan(specs: Sequence[Sequence[ShardSpec]]) -> tuple[ArrayInfo, ...]:
    """The arrays, sorted by name, from the shard specs of each rank.

    Raises CheckpointError naming array and ranks where the shard specs contradict each other or leave a gap.
    """
    by_array: dict[str, list[tuple[int, ShardSpec]]] = {}
    for rank, each in enumerate(specs):
        for spec in each:
            by_array.setdefault(spec.array, []).append((rank, spec))
    names = set(by_array)
    for name in names:
        for end in (place for place, letter in enumerate(name) if letter == "/"):
            if name[:end] in names:
                raise CheckpointError(f"{name[:end]} is an array, so {name} cannot be inside it; rename one of them")
    return tuple(_array(name, by_array[name]) for name in sorted(names))


def chunks_to_write(info: ArrayInfo, ordinal: int, spec: ShardSpec) -> Iterator[ChunkRun]:
    """The chunks of a block that this replica writes: of n replicas, in all copies, every one an n-th, in a row.

    Args:
        ordinal: the array's place among all arrays; it turns the distribution, so that arrays of few chunks are spread too.
    """
    spans = info.span(spec.offset, spec.extent)
    writers = spec.copies * spec.replicas
    part = (spec.copy * spec.replicas + spec.replica - ordinal - sum(each.start for each in spans)) % writers
    count = math.prod(map(len, spans))
    low, high = part * count // writers, (part + 1) * count // writers
    begin = 0
    for chunk_run in info.chunk_runs(spec.offset, spec.extent):
        mine = chunk_run.part(chunk_run.slot + low - begin, chunk_run.slot + high - begin)
        if mine.length:
            yield mine
        begin += chunk_run.length


def _array(name: str, specs: Sequence[tuple[int, ShardSpec]]) -> ArrayInfo:
    first_rank, first = specs[0]
    for rank, spec in specs:
        if (spec.shape, spec.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"array {name} is {first.dtype} {first.shape} on rank {first_rank} and {spec.dtype} {spec.shape} on "
                f"rank {rank}; the global shape must be the same everywhere"
            )
    info = arrange(name, first.dtype, first.shape, _unit(first.shape, [spec for _, spec in specs]))
    holders: dict[tuple[Shape, Shape], list[tuple[int, ShardSpec]]] = {}
    for rank, spec in specs:
        if math.prod(spec.extent):
            holders.setdefault((spec.offset, spec.extent), []).append((rank, spec))
    covered = np.zeros(info.grid, np.int32)
    for (offset, extent), held in holders.items():
        _check_replicas(name, offset, extent, held)
        covered[tuple(slice(part.start, part.stop) for part in info.span(offset, extent))] += 1
    if math.prod(info.shape) and not (covered == 1).all():
        place = np.argwhere(covered != 1)[0]
        where = tuple(int(number) * part for number, part in zip(place, info.chunk, strict=True))
        what = "no rank holds" if covered[tuple(place)] == 0 else "two different blocks hold"
        raise CheckpointError(f"array {name} {first.shape}: {what} the element at {where}; blocks must fill it exactly once")
    return info


def _unit(shape: Shape, specs: Sequence[ShardSpec]) -> Shape:
    """What all ranks' units have in common; a unit as long as the array binds nobody."""
    return tuple(
        math.gcd(*(spec.unit[dim] for spec in specs if spec.unit[dim] < length)) or max(1, length)
        for dim, length in enumerate(shape)
    )


def _check_replicas(name: str, offset: Shape, extent: Shape, held: Sequence[tuple[int, ShardSpec]]) -> None:
    replicas, copies = held[0][1].replicas, held[0][1].copies
    found = sorted((spec.copy, spec.replica, spec.copies, spec.replicas) for _, spec in held)
    if found != [(copy, number, copies, replicas) for copy in range(copies) for number in range(replicas)]:
        said = ", ".join(f"rank {rank} is {spec.replica} of {spec.replicas}" + _of_copy(spec) for rank, spec in held)
        raise CheckpointError(
            f"array {name}: the block of {extent} at {offset} has {len(held)} holders ({said}); each must be another one "
            "of as many replicas"
        )


def _of_copy(spec: ShardSpec) -> str:
    return f" in copy {spec.copy} of {spec.copies}" if spec.copies > 1 else ""
