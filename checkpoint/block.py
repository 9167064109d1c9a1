"""A block's memory, chunk by chunk: straight from the tensor where it lies in one stretch, through a copy where not.

Owns the copying between a piece's tensor and chunks. Touches no file.
"""

import math
from typing import Any

import numpy as np
import torch

from checkpoint.layout import ArrayInfo, Shape
from checkpoint.piece import Piece

Numbers = np.ndarray[Any, np.dtype[Any]]
Box = tuple[slice, ...]


class Block:
    """The tensor of a piece that is not empty, cut as the array's chunks are."""

    def __init__(self, piece: Piece, info: ArrayInfo) -> None:
        self._info = info
        self._offset = piece.offset
        self._extent = piece.extent
        self._data = piece.data.detach()
        self._numbers: Numbers | None = None
        self._memory: memoryview | None = None
        if self._data.device.type == "cpu":
            self._numbers = _bits(self._data).numpy()
            if self._data.is_contiguous():
                if _in_one_stretch(info.chunk, piece.extent):
                    self._memory = self._numbers.reshape(-1).view(np.uint8).data
                self._strides = [math.prod(piece.extent[dim + 1 :]) for dim in range(len(piece.extent))]

    def memory(self, chunk: Shape) -> memoryview | None:
        """A whole chunk's bytes in the tensor itself, writable; None where they do not lie there in one stretch."""
        if self._memory is None:
            return None
        start = 0
        for place, part, offset, extent, stride in zip(
            chunk, self._info.chunk, self._offset, self._extent, self._strides, strict=True
        ):
            low = place * part - offset
            if low < 0 or low + part > extent:
                return None
            start += low * stride
        first = start * self._info.element.size_bytes
        return self._memory[first : first + self._info.chunk_bytes]

    def gather(self, chunk: Shape, staging: torch.Tensor) -> None:
        """Copy a chunk into `staging` (bytes, in host memory), with zeros for what is beyond the block."""
        in_chunk, in_block = self._common(chunk)
        target = _shaped(staging, self._info, self._data.dtype)
        whole = all(box.stop - box.start == part for box, part in zip(in_chunk, self._info.chunk, strict=True))
        if not whole:
            staging[: self._info.chunk_bytes].zero_()
        if self._numbers is not None:
            _bits(target).numpy()[in_chunk] = self._numbers[in_block]
        else:
            target[in_chunk].copy_(self._data[in_block])

    def scatter(self, chunk: Shape, staging: torch.Tensor) -> None:
        """Copy what a chunk in `staging` (bytes, in host memory) and the block have in common into the tensor."""
        in_chunk, in_block = self._common(chunk)
        source = _shaped(staging, self._info, self._data.dtype)
        if self._numbers is not None:
            self._numbers[in_block] = _bits(source).numpy()[in_chunk]
        else:
            self._data[in_block].copy_(source[in_chunk])

    def _common(self, chunk: Shape) -> tuple[Box, Box]:
        in_chunk, in_block = [], []
        for place, part, offset, extent in zip(chunk, self._info.chunk, self._offset, self._extent, strict=True):
            origin = place * part
            low, high = max(origin, offset), min(origin + part, offset + extent)
            in_chunk.append(slice(low - origin, high - origin))
            in_block.append(slice(low - offset, high - offset))
        return tuple(in_chunk), tuple(in_block)


def _in_one_stretch(chunk: Shape, extent: Shape) -> bool:
    """Whether a whole chunk of a contiguous block has no gaps: 1, …, 1, anything, everything, …, everything."""
    dim = 0
    while dim < len(chunk) and chunk[dim] == 1:
        dim += 1
    return all(part == length for part, length in zip(chunk[dim + 1 :], extent[dim + 1 :], strict=True))


def _shaped(staging: torch.Tensor, info: ArrayInfo, dtype: torch.dtype) -> torch.Tensor:
    return staging[: info.chunk_bytes].view(dtype).reshape(info.chunk)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that NumPy has; NumPy copies without starting torch's threads."""
    if data.dtype == torch.bfloat16:
        return data.view(torch.int16)
    if data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return data.view(torch.uint8)
    return data
