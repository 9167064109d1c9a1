"""Where every byte of an array goes: chunks, slots, shard files.

An array is cut into chunks that no two ranks share. A chunk has a slot of its own in a shard file, at an offset that
follows from the array's shape, element and chunk alone; so ranks, and later nodes, write side by side without a word, and
the same bytes lie at the same place on every copy. docs/checkpoint-format.md says the same in prose.

Owns the arithmetic. Pure: reads and writes nothing.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import crc32c

from checkpoint import crc
from checkpoint.elements import Element, element
from checkpoint.runs import runs

PAGE_BYTES = 4096
CRC_BYTES = 4
CHUNK_TARGET_BYTES = 512 << 10
CHUNK_LEAST_BYTES = 256 << 10
CHUNKS_IN_UNIT = 32
SEGMENT_BYTES = 4 << 10
SHARD_LIMIT_BYTES = 16 << 30

Shape = tuple[int, ...]

_ABSENT = (1 << 64) - 1


def arrange(name: str, dtype: str, shape: Shape, unit: Shape) -> "ArrayInfo":
    """The layout of an array whose shard boundaries, on every rank, are multiples of `unit` or the array's edge."""
    size = element(dtype).size_bytes
    chunk = chunk_shape(shape, size, unit)
    grid = tuple(max(1, -(-full // part)) for full, part in zip(shape, chunk, strict=True))
    per_shard = list(grid)
    for dim in range(len(grid)):
        shard_bytes = _slot_bytes(size * math.prod(chunk)) * math.prod(per_shard)
        if shard_bytes <= SHARD_LIMIT_BYTES:
            break
        per_shard[dim] = max(1, per_shard[dim] * SHARD_LIMIT_BYTES // shard_bytes)
    return ArrayInfo(name, dtype, shape, chunk, tuple(per_shard))


def chunk_shape(shape: Shape, element_bytes: int, unit: Shape, target_bytes: int | None = None) -> Shape:
    """The chunks of an array: tiles that divide `unit`, so small that another layout needs few bytes beyond its own.

    Args:
        target_bytes: about the most that a chunk has; None for a 32nd of the unit, between 256 and 512 KiB.
    """
    chunk = [max(1, min(part, full)) for part, full in zip(unit, shape, strict=True)]
    if target_bytes is None:
        unit_bytes = element_bytes * math.prod(chunk)
        target_bytes = min(CHUNK_TARGET_BYTES, max(CHUNK_LEAST_BYTES, unit_bytes // CHUNKS_IN_UNIT))
    segment = max(1, min(SEGMENT_BYTES, target_bytes) // element_bytes)  # shorter ones are slow to copy
    last = [(len(chunk) - 1, segment)] if chunk else []
    for dim, least in [*last, *((dim, 1) for dim in range(len(chunk)))]:
        size = element_bytes * math.prod(chunk)
        if size <= target_bytes:
            break
        wanted = max(least, chunk[dim] * target_bytes // size)
        if wanted < chunk[dim]:
            chunk[dim] = _cut(chunk[dim], wanted, free=unit[dim] >= shape[dim])
    return tuple(chunk)


def _cut(length: int, wanted: int, *, free: bool) -> int:
    """About `wanted`; a divisor of the length, unless nobody shards it (`free`) and there is none near."""
    part = _divisor(length, wanted)
    if free and not wanted <= 2 * part <= 4 * wanted:
        return -(-length // -(-length // wanted))  # in about equal parts
    return part


def _divisor(length: int, wanted: int) -> int:
    """The divisor nearest to `wanted`; the length itself (the next dimension is cut instead) if all are far away."""
    small = [number for number in range(1, math.isqrt(length) + 1) if length % number == 0]
    divisors = small + [length // number for number in small]
    below = max(number for number in divisors if number <= wanted)
    if 32 * below >= wanted:
        return below
    above = min(number for number in divisors if number > wanted)
    return above if above <= 4 * wanted else length


def _slot_bytes(chunk_bytes: int) -> int:
    return _page_up(chunk_bytes + CRC_BYTES)


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class ChunkRun(NamedTuple):
    """Chunks whose slots are neighbours in a shard file: `length` of them from `slot` on."""

    shard: "Shard"
    slot: int
    length: int

    def part(self, first: int, last: int) -> "ChunkRun":
        """What it has between two slots, the last one exclusive."""
        low, high = max(first, self.slot), min(last, self.slot + self.length)
        return ChunkRun(self.shard, low, max(0, high - low))

    def boxes(self) -> Iterator[tuple[Shape, Shape]]:
        """The same chunks as boxes: place of the first one in the grid of all chunks, chunks along each dimension."""
        corner = [place * count for place, count in zip(self.shard.place, self.shard.array.per_shard, strict=True)]
        for place, counts in _boxes(self.slot, self.length, self.shard.array.per_shard):
            yield tuple(start + inside for start, inside in zip(corner, place, strict=True)), counts


def _boxes(first: int, count: int, grid: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Numbers in a row, counted through a grid with the last dimension fastest, as boxes of it."""
    if not grid:
        yield (), ()
        return
    inner, last = math.prod(grid[1:]), first + count
    while first < last:
        place, rest = divmod(first, inner)
        if rest == 0 and last - first >= inner:
            rows = (last - first) // inner
            yield (place, *(0,) * len(grid[1:])), (rows, *grid[1:])
            first += rows * inner
        else:
            part = min(inner - rest, last - first)
            for inside, counts in _boxes(rest, part, grid[1:]):
                yield (place, *inside), (1, *counts)
            first += part


@dataclass(frozen=True)
class ArrayInfo:
    """One global array.

    Attributes:
        name: "/" separates Zarr groups.
        dtype: torch's name for the elements.
        shape: of the array; () for a single number, 0 where it is empty.
        chunk: shape of a chunk; chunks at the edge are padded with zeros to it.
        per_shard: chunks along each dimension of a shard file.
    """

    name: str
    dtype: str
    shape: Shape
    chunk: Shape
    per_shard: Shape

    @cached_property
    def element(self) -> Element:
        """The elements' type."""
        return element(self.dtype)

    @cached_property
    def grid(self) -> Shape:
        """Chunks along each dimension."""
        return tuple(-(-full // part) for full, part in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def shard_shape(self) -> Shape:
        """Elements along each dimension of a shard file."""
        return tuple(count * part for count, part in zip(self.per_shard, self.chunk, strict=True))

    @cached_property
    def chunk_bytes(self) -> int:
        """A chunk without its checksum."""
        return self.element.size_bytes * math.prod(self.chunk)

    @cached_property
    def sharded(self) -> bool:
        """Whether the files have an index: Zarr has no shards of arrays without dimensions."""
        return len(self.shape) > 0

    @cached_property
    def slot_bytes(self) -> int:
        """A chunk, its checksum, and zeros to the next page."""
        return _slot_bytes(self.chunk_bytes) if self.sharded else self.chunk_bytes + CRC_BYTES

    @cached_property
    def strides(self) -> Shape:
        """In a shard file, in bytes: from chunk to chunk along each dimension, then from element to element of a chunk."""
        between = (self.slot_bytes * math.prod(self.per_shard[dim + 1 :]) for dim in range(len(self.shape)))
        within = (self.element.size_bytes * math.prod(self.chunk[dim + 1 :]) for dim in range(len(self.shape)))
        return (*between, *within)

    @cached_property
    def index_bytes(self) -> int:
        """The index with its checksum, without the zeros that follow."""
        return 16 * math.prod(self.per_shard) + CRC_BYTES if self.sharded else 0

    @cached_property
    def first_slot(self) -> int:
        """Offset of slot 0."""
        return _page_up(self.index_bytes)

    @cached_property
    def shards(self) -> dict[Shape, "Shard"]:
        """All shard files by their place in the grid of shards; none of an empty array."""
        counts = [-(-length // part) for length, part in zip(self.grid, self.per_shard, strict=True)]
        return {place: Shard(self, place) for place in product(*map(range, counts))}

    def offset(self, slot: int) -> int:
        """Where a slot begins in its file."""
        return self.first_slot + slot * self.slot_bytes

    def locate(self, chunk: Shape) -> tuple["Shard", int]:
        """Shard file and slot of the chunk at this place in the grid of chunks."""
        place, slot = [], 0
        for coordinate, count in zip(chunk, self.per_shard, strict=True):
            shard, inside = divmod(coordinate, count)
            place.append(shard)
            slot = slot * count + inside
        return self.shards[tuple(place)], slot

    def touched(self, offset: Shape, extent: Shape) -> Iterator[Shape]:
        """The chunks that a block touches, by their place in the grid of chunks, last dimension fastest."""
        return product(*self.span(offset, extent))

    def chunk_runs(self, offset: Shape, extent: Shape) -> Iterator[ChunkRun]:
        """The chunks that a block touches, as runs as long as can be."""
        spans = self.span(offset, extent)
        if not all(spans):
            return
        counts = self.per_shard
        files = (range(part.start // count, -(-part.stop // count)) for part, count in zip(spans, counts, strict=True))
        for place in product(*files):
            inside = [
                range(max(part.start - at * count, 0), min(part.stop - at * count, count))
                for part, at, count in zip(spans, place, counts, strict=True)
            ]
            dim = len(inside) - 1
            while dim > 0 and len(inside[dim]) == counts[dim]:
                dim -= 1
            for lead in product(*(part[: 1 if number == dim else None] for number, part in enumerate(inside[: dim + 1]))):
                slot = 0
                for number, count in enumerate(counts):
                    slot = slot * count + (lead[number] if number <= dim else 0)
                yield ChunkRun(self.shards[place], slot, math.prod(map(len, inside[dim:])) if inside else 1)

    def span(self, offset: Shape, extent: Shape) -> list[range]:
        """The chunks that a block touches along each dimension; none of an empty block."""
        return [
            range(start // part, -(-(start + length) // part) if length else start // part)
            for start, length, part in zip(offset, extent, self.chunk, strict=True)
        ]


@dataclass(frozen=True)
class Shard:
    """One shard file of an array, at its place in the grid of shards."""

    array: ArrayInfo
    place: Shape

    @cached_property
    def path(self) -> str:
        """Relative to the checkpoint."""
        return f"{self.array.name}/" + ".".join(("c", *map(str, self.place)))

    @cached_property
    def slots(self) -> Sequence[int]:
        """The slots that hold a chunk, ascending; the last shard along a dimension may lack some."""
        counts = self.array.per_shard
        used = [
            min(count, length - place * count) for length, place, count in zip(self.array.grid, self.place, counts, strict=True)
        ]
        if tuple(used[1:]) == counts[1:]:
            return range(math.prod(used))
        slots = [0]
        for count, part in zip(counts, used, strict=True):
            slots = [slot * count + inside for slot in slots for inside in range(part)]
        return slots

    @cached_property
    def size_bytes(self) -> int:
        """Of the file."""
        return self.array.offset(self.slots[-1] + 1)

    @cached_property
    def index(self) -> bytes:
        """The first bytes of the file: offset and length of each chunk, and their crc32c."""
        if not self.array.sharded:
            return b""
        first, step, length = self.array.first_slot, self.array.slot_bytes, self.array.chunk_bytes + CRC_BYTES
        entries = [_ABSENT] * (2 * math.prod(self.array.per_shard))
        for slot in self.slots:
            entries[2 * slot] = first + step * slot
            entries[2 * slot + 1] = length
        text = struct.pack(f"<{len(entries)}Q", *entries)
        return text + struct.pack("<I", crc32c.crc32c(text))

    @property
    def head(self) -> bytes:
        """The index, and the zeros up to slot 0."""
        return self.index.ljust(self.array.first_slot, b"\0")

    @cached_property
    def crc32c(self) -> int:
        """Of the whole file, as it must be: chunks that are followed by their own checksums do not change it."""
        array = self.array
        gap = array.slot_bytes - array.chunk_bytes - CRC_BYTES
        slot = crc.combine(crc.SEALED, crc.zeros(gap), gap)
        gap = array.first_slot - array.index_bytes
        total = crc.combine(crc32c.crc32c(self.index), crc.zeros(gap), gap)
        for absent, used in self._runs():
            gap, full = absent * array.slot_bytes, used * array.slot_bytes
            total = crc.combine(total, crc.zeros(gap), gap)
            total = crc.combine(total, crc.repeat(slot, array.slot_bytes, used), full)
        return total

    def chunks_crc32c(self, checksums: Mapping[int, int]) -> int:
        """crc32c over the chunks' checksums, by slot, in the order of the slots: it stands for the contents."""
        return int(crc32c.crc32c(struct.pack(f"<{len(self.slots)}I", *(checksums[slot] for slot in self.slots))))

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Slots in a row that are absent, and in use after them, again and again."""
        end = 0
        for first, count in runs(self.slots):
            yield first - end, count
            end = first + count
