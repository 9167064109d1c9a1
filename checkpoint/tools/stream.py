"""Reading arrays box by box, so that no array need fit into memory.

Owns the cutting of arrays into boxes and the reading of one; each chunk that is read is compared with its checksum.
"""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import product

import torch

from checkpoint.layout import ArrayInfo, Shape
from checkpoint.loading import Opened
from checkpoint.local_shard import LocalShard
from checkpoint.tools.refusal import WRONG, Refusal

BOX_BYTES = 32 << 20

Box = tuple[Shape, Shape]
"""Offset and extent."""


def boxes(shape: Shape, element_bytes: int, chunks: Sequence[Shape], limit_bytes: int = BOX_BYTES) -> Iterator[Box]:
    """Cut an array into boxes of at most `limit_bytes`, along the boundaries of chunks as far as that is possible. Pure.

    Args:
        shape: of the array.
        element_bytes: of an element.
        chunks: shapes of a chunk, one for each of the layouts that will be read or written.
        limit_bytes: of a box.
    """
    extent = _extent(shape, max(1, limit_bytes // element_bytes), chunks)
    for offset in product(*(range(0, full, part) for full, part in zip(shape, extent, strict=True))):
        yield offset, tuple(min(part, full - start) for start, part, full in zip(offset, extent, shape, strict=True))


def _extent(shape: Shape, limit: int, chunks: Sequence[Shape]) -> Shape:
    """A box that no chunk crosses; where that is too much, one that few do."""
    sizes = list(zip(*chunks, strict=True)) if shape else []
    box = [max(1, min(full, max(parts))) for full, parts in zip(shape, sizes, strict=True)]
    while math.prod(box) > limit:
        # Chunks that are cut are read again for each box: cut where they are already small.
        dim = max((dim for dim, length in enumerate(box) if length > 1), key=lambda dim: box[dim] / min(sizes[dim]))
        box[dim] = -(-box[dim] // 2)
    for dim in reversed(range(len(box))):
        aligned = min(math.lcm(*sizes[dim]), shape[dim])
        room = limit // max(1, math.prod(box) // box[dim])
        if box[dim] < aligned <= room:
            box[dim] = aligned
    for dim in reversed(range(len(box))):
        room = limit // max(1, math.prod(box))
        box[dim] = max(1, min(shape[dim], box[dim] * max(1, room)))
        if box[dim] < shape[dim]:
            break
    return tuple(box)


def read(source: Opened, info: ArrayInfo, box: Box) -> torch.Tensor:
    """One box of an array, a tensor of the array's type. Raises DamagedCheckpoint."""
    offset, extent = box
    data = torch.empty(extent, dtype=getattr(torch, info.dtype))
    source.fill([LocalShard(info.name, info.shape, offset, data, (1,) * len(extent))], threads=1)
    return data


def size_bytes(info: ArrayInfo) -> int:
    """Of the array's elements."""
    return math.prod(info.shape) * info.element.size_bytes


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The names that one of the patterns fits, all of them where there is no pattern; `*` stands for "/" too.

    Raises Refusal where none fits.
    """
    found = sorted(name for name in names if not only or any(fnmatchcase(name, pattern) for pattern in only))
    if only and not found:
        raise Refusal(f"no array is called {' or '.join(only)}; there are {', '.join(sorted(names)[:5])} and others", WRONG)
    return found
