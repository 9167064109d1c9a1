"""A block of a tensor beside the slots of its chunks in memory.

Owns the copying between the two: boxes of whole chunks at once, those at the edges and on a GPU one by one. Touches no file.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from checkpoint.layout import ArrayInfo, ChunkRun, Shape
from checkpoint.local_shard import LocalShard

Numbers = np.ndarray[Any, np.dtype[Any]]
Pairs = Iterator[tuple[Any, Any]]
Box = tuple[Shape, Shape]
"""Chunks: place of the first one in the grid of all chunks, and how many along each dimension."""


class Block:
    """The tensor of a local shard that is not empty, cut as the array's chunks are.

    Args:
        as_tensors: pairs are tensors, as for a GPU, also where the block is on the CPU.
    """

    def __init__(self, local_shard: LocalShard, info: ArrayInfo, *, as_tensors: bool = False) -> None:
        self._info = info
        self._offset = local_shard.offset
        self._extent = local_shard.extent
        self._data = local_shard.data.detach()
        self.as_tensors = as_tensors
        self._numbers: Numbers | None = None
        # Chunks wholly inside the block, along each dimension.
        bounds = zip(info.chunk, local_shard.offset, local_shard.extent, strict=True)
        self._inner = [(-(-offset // part), (offset + extent) // part) for part, offset, extent in bounds]
        if self._data.device.type == "cpu" and not as_tensors:
            self._numbers = _bits(self._data).numpy()  # which copies without starting torch's threads

    def gather(self, chunk_run: ChunkRun, slots: torch.Tensor) -> None:
        """Copy chunks into `slots` (bytes in host memory, as in the file), with zeros for what is beyond the block."""
        if not self.fills(chunk_run):
            slots.zero_()
        for target, source in self.pairs(chunk_run, slots):
            target[...] = source

    def scatter(self, chunk_run: ChunkRun, slots: torch.Tensor) -> None:
        """Copy what chunks in `slots` (bytes in host memory, as in the file) and the block have in common into the tensor."""
        for source, target in self.pairs(chunk_run, slots):
            target[...] = source

    def pairs(self, chunk_run: ChunkRun, slots: torch.Tensor) -> Pairs:
        """Views of the same elements in `slots` and in the block: NumPy's, or torch's where the block is on a GPU."""
        if self._numbers is None:
            for _, corner, extent in self._parts(chunk_run):
                yield from self._singles(chunk_run, slots, corner, extent)
            return
        data = slots.numpy().data
        for number, corner, extent in self._parts(chunk_run):
            if self._has(corner, extent):
                yield self._in_slots(data, number, extent), self._in_block(corner, extent)
            else:
                yield from self._singles(chunk_run, slots, corner, extent)

    def boxes(self, chunk_run: ChunkRun, slots: torch.Tensor) -> Pairs:
        """The same as torch's views, of which one has all chunks of a box: of `slots` that are where the block is."""
        for number, corner, extent in self._parts(chunk_run):
            if self._has(corner, extent) and math.prod(extent) > 1:
                yield self._box(slots, number, corner, extent)
            else:
                yield from self._singles(chunk_run, slots, corner, extent)

    def fills(self, chunk_run: ChunkRun) -> bool:
        """Whether all chunks are wholly inside the block."""
        return all(self._has(place, counts) for place, counts in chunk_run.boxes())

    def _parts(self, chunk_run: ChunkRun) -> Iterator[tuple[int, Shape, Shape]]:
        """The boxes of a run, cut at the block's edges; before each, the place of its first slot in the run."""
        for place, counts in chunk_run.boxes():
            for corner, extent in [(place, counts)] if self._has(place, counts) else self._cut(place, counts):
                yield self._info.locate(corner)[1] - chunk_run.slot, corner, extent

    def _singles(self, chunk_run: ChunkRun, slots: torch.Tensor, corner: Shape, extent: Shape) -> Pairs:
        """Each chunk of a box by itself."""
        for chunk in product(*(range(start, start + count) for start, count in zip(corner, extent, strict=True))):
            yield self._single(slots, self._info.locate(chunk)[1] - chunk_run.slot, chunk)

    def _box(self, slots: torch.Tensor, number: int, corner: Shape, extent: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks of a box that are wholly inside the block: dimensions of the box, then of a chunk."""
        info, shape = self._info, (*extent, *self._info.chunk)
        strides = [each // info.element.size_bytes for each in info.strides]
        target = slots[number * info.slot_bytes :].view(self._data.dtype).as_strided(shape, strides)
        starts = [place * part - offset for place, part, offset in zip(corner, info.chunk, self._offset, strict=True)]
        source = self._data[tuple(slice(start, None) for start in starts)]
        between = [stride * part for stride, part in zip(source.stride(), info.chunk, strict=True)]
        return target, source.as_strided(shape, (*between, *source.stride()))

    def _cut(self, place: Shape, counts: Shape) -> Iterator[Box]:
        """A box of chunks in parts, at the first and the last chunk along each dimension that are wholly inside the block."""
        parts = []
        for start, count, inner in zip(place, counts, self._inner, strict=True):
            bounds = sorted({start, start + count, *(each for each in inner if start < each < start + count)})
            parts.append([(low, high - low) for low, high in pairwise(bounds)])
        for box in product(*parts):
            yield tuple(low for low, _ in box), tuple(length for _, length in box)

    def _has(self, place: Shape, counts: Shape) -> bool:
        """Whether a box of chunks is wholly inside the block."""
        for start, count, (low, high) in zip(place, counts, self._inner, strict=True):
            if start < low or start + count > high:
                return False
        return True

    def _in_slots(self, data: memoryview, number: int, counts: Shape) -> Numbers:
        """Chunks of a box, the first of them in slot `number`: dimensions of the box, then of a chunk."""
        assert self._numbers is not None
        info = self._info
        return np.ndarray((*counts, *info.chunk), self._numbers.dtype, data, number * info.slot_bytes, info.strides)

    def _in_block(self, place: Shape, counts: Shape) -> Numbers:
        """The same of the block."""
        starts = [start - low for start, (low, _) in zip(place, self._inner, strict=True)]
        box: tuple[Any, ...] = (*(slice(start, start + count) for start, count in zip(starts, counts, strict=True)), ...)
        found: Numbers = self._tiles[box]  # a view, also of an array without dimensions
        return found

    @cached_property
    def _tiles(self) -> Numbers:
        """The chunks wholly inside the block: dimensions of their grid, then of a chunk."""
        assert self._numbers is not None
        chunk = self._info.chunk
        inside: tuple[Any, ...] = tuple(
            slice(low * part - offset, high * part - offset)
            for part, offset, (low, high) in zip(chunk, self._offset, self._inner, strict=True)
        )
        numbers = self._numbers[(*inside, ...)]
        counts = (high - low for low, high in self._inner)
        strides = (*(stride * part for stride, part in zip(numbers.strides, chunk, strict=True)), *numbers.strides)
        return np.lib.stride_tricks.as_strided(numbers, (*counts, *chunk), strides)

    def _single(self, slots: torch.Tensor, number: int, chunk: Shape) -> tuple[Any, Any]:
        """What one chunk, in slot `number`, and the block have in common."""
        in_chunk: list[slice] = []
        in_block: list[slice] = []
        for place, part, offset, extent in zip(chunk, self._info.chunk, self._offset, self._extent, strict=True):
            origin = place * part
            low, high = max(origin, offset), min(origin + part, offset + extent)
            in_chunk.append(slice(low - origin, high - origin))
            in_block.append(slice(low - offset, high - offset))
        theirs: tuple[Any, ...] = (..., *in_chunk)  # with the dots a view, also of an array without dimensions
        mine: tuple[Any, ...] = (..., *in_block)
        start = number * self._info.slot_bytes
        whole = slots[start : start + self._info.chunk_bytes].view(self._data.dtype).reshape(self._info.chunk)
        if self._numbers is None:
            return whole[theirs], self._data[mine]
        return _bits(whole).numpy()[theirs], self._numbers[mine]


def _bits(data: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that NumPy has."""
    if data.dtype == torch.bfloat16:
        return data.view(torch.int16)
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return data.view(torch.uint8)
    return data
