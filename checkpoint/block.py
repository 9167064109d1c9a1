"""A block of a tensor beside the slots of its chunks in memory.

Owns the copying between the two: boxes of whole chunks at once, those at the edges and on a GPU one by one. Touches no file.
"""

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from checkpoint.layout import ArrayInfo, Shape, Strip
from checkpoint.piece import Piece

Numbers = np.ndarray[Any, np.dtype[Any]]
Pairs = Iterator[tuple[Any, Any]]


class Block:
    """The tensor of a piece that is not empty, cut as the array's chunks are."""

    def __init__(self, piece: Piece, info: ArrayInfo) -> None:
        self._info = info
        self._offset = piece.offset
        self._extent = piece.extent
        self._data = piece.data.detach()
        self._numbers: Numbers | None = None
        if self._data.device.type == "cpu":
            self._numbers = _bits(self._data).numpy()  # which copies without starting torch's threads

    def gather(self, strip: Strip, slots: torch.Tensor) -> None:
        """Copy chunks into `slots` (bytes in host memory, as in the file), with zeros for what is beyond the block."""
        if not all(self._has(place, counts) for place, counts in strip.boxes()):
            slots.zero_()
        for target, source in self.pairs(strip, slots):
            target[...] = source

    def scatter(self, strip: Strip, slots: torch.Tensor) -> None:
        """Copy what chunks in `slots` (bytes in host memory, as in the file) and the block have in common into the tensor."""
        for source, target in self.pairs(strip, slots):
            target[...] = source

    def pairs(self, strip: Strip, slots: torch.Tensor) -> Pairs:
        """Views of the same elements in `slots` and in the block: NumPy's, or torch's where the block is on a GPU."""
        for place, counts in strip.boxes():
            for corner, extent in self._cut(place, counts):
                number = self._info.locate(corner)[1] - strip.slot
                if self._numbers is not None and self._has(corner, extent):
                    yield self._box(self._numbers, slots, number, corner, extent)
                    continue
                for chunk in product(*(range(start, start + count) for start, count in zip(corner, extent, strict=True))):
                    yield self._single(slots, self._info.locate(chunk)[1] - strip.slot, chunk)

    def _cut(self, place: Shape, counts: Shape) -> Iterator[tuple[Shape, Shape]]:
        """A box of chunks in parts, at the first and the last chunk along each dimension that are wholly inside the block."""
        parts = []
        for start, count, part, offset, extent in zip(place, counts, self._info.chunk, self._offset, self._extent, strict=True):
            inner = (-(-offset // part), (offset + extent) // part)
            bounds = sorted({start, start + count, *(each for each in inner if start < each < start + count)})
            parts.append([(low, high - low) for low, high in pairwise(bounds)])
        for box in product(*parts):
            yield tuple(low for low, _ in box), tuple(length for _, length in box)

    def _has(self, place: Shape, counts: Shape) -> bool:
        """Whether a box of chunks is wholly inside the block."""
        return all(
            offset <= start * part and (start + count) * part <= offset + extent
            for start, count, part, offset, extent in zip(place, counts, self._info.chunk, self._offset, self._extent, strict=True)
        )

    def _box(self, numbers: Numbers, slots: torch.Tensor, number: int, place: Shape, counts: Shape) -> tuple[Numbers, Numbers]:
        """Chunks wholly inside the block, the first of them in slot `number`: dimensions of the box, then of a chunk."""
        info = self._info
        size = info.element.size_bytes
        between = [info.slot_bytes * math.prod(info.per_shard[dim + 1 :]) for dim in range(len(counts))]
        within = [size * math.prod(info.chunk[dim + 1 :]) for dim in range(len(counts))]
        shape = (*counts, *info.chunk)
        offset = number * info.slot_bytes
        in_slots = np.ndarray(shape, numbers.dtype, slots.numpy().data, offset, (*between, *within))
        starts = [start * part - first for start, part, first in zip(place, info.chunk, self._offset, strict=True)]
        box: tuple[Any, ...] = (
            ...,
            *(slice(low, low + count * part) for low, count, part in zip(starts, counts, info.chunk, strict=True)),
        )
        mine = numbers[box]  # a view, also of an array without dimensions
        strides = (*(stride * part for stride, part in zip(mine.strides, info.chunk, strict=True)), *mine.strides)
        return in_slots, np.lib.stride_tricks.as_strided(mine, shape, strides)

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
