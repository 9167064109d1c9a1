"""Local shards: what one rank holds of the global arrays.

Owns the translation from tensors, plain or distributed, to blocks of global arrays. Touches no file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from checkpoint.elements import element
from checkpoint.layout import Shape
from checkpoint.safe_name import array_name


@dataclass(frozen=True)
class LocalShard:
    """One rank's block of a global array. Raises ValueError where its parts do not fit together.

    Attributes:
        array: its name, by the rules of `safe_name.array_name`; "/" separates Zarr groups, as in `model/blocks.query.weight`.
        shape: of the global array; () for a single number.
        offset: of this block in it.
        data: the block, with as many dimensions as the array; without elements on a rank that holds nothing.
        unit: the boundaries of every rank's block are multiples of this, or the array's edge.
        replica: this rank's index among the `replicas` ranks that hold the same block; they share the writing.
        replicas: how many they are.
        copy: index of these ranks among `copies` such sets on different nodes. A checkpoint they write together; in snapshots each
            set has the whole block, so that any of their nodes may be lost.
        copies: how many sets there are.
    """

    array: str
    shape: Shape
    offset: Shape
    data: torch.Tensor
    unit: Shape
    replica: int = 0
    replicas: int = 1
    copy: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        array_name(self.array, self.shape)
        element(self.dtype)
        if not len(self.shape) == len(self.offset) == len(self.unit) == self.data.dim():
            raise ValueError(
                f"{self.array}: shape {self.shape}, offset {self.offset}, unit {self.unit} and the block's own shape "
                f"{self.extent} must have the same number of dimensions"
            )
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"{self.array}: replica {self.replica} of {self.replicas}; the first one is 0")
        if not 0 <= self.copy < self.copies:
            raise ValueError(f"{self.array}: copy {self.copy} of {self.copies}; the first one is 0")
        for full, start, length, part in zip(self.shape, self.offset, self.extent, self.unit, strict=True):
            end = start + length
            if part < 1 or start < 0 or end > full:
                raise ValueError(f"{self.array}: {self._where()} is not inside the array, or its unit is below 1")
            if self.data.numel() and (start % part or (end % part and end != full)):
                raise ValueError(f"{self.array}: {self._where()} does not begin and end at multiples of {self.unit}")

    @property
    def dtype(self) -> str:
        """torch's name of the elements, without the `torch.`."""
        return str(self.data.dtype).removeprefix("torch.")

    @property
    def extent(self) -> Shape:
        """Shape of the block."""
        return tuple(self.data.shape)

    def _where(self) -> str:
        return f"the block of {self.extent} at {self.offset} in {self.shape}"


def local_shard_of(
    name: str,
    tensor: torch.Tensor,
    *,
    stack: tuple[int, int] | None = None,
    replica: int = 0,
    replicas: int = 1,
    apart: tuple[str, int] | None = None,
) -> LocalShard:
    """The local shard that this rank holds of a tensor; it shares the tensor's memory.

    Args:
        name: of the array.
        tensor: plain, or a DTensor with Shard and Replicate placements on any mesh: evenly or not, several mesh dimensions
            on one tensor dimension, and FSDP2 on top of tensor parallelism among them.
        stack: (index, count): the tensor is entry `index` of an array [count, *shape], as the layers of a model are.
        replica: this rank's index among `replicas` groups of ranks that hold the same, beyond what a DTensor knows itself.
        replicas: how many they are.
        apart: (mesh dimension, ranks): of the ranks along this dimension, so many in a row are on one node, and the next ones on
            another; they hold copies of what they replicate, see `LocalShard`.

    Raises ValueError for other placements, or where this rank is not in the tensor's mesh.
    """
    local = tensor.detach()
    shape: Shape = tuple(tensor.shape)
    offset: Shape = (0,) * len(shape)
    unit: Shape = tuple(max(1, length) for length in shape)
    copy, copies = 0, 1
    if isinstance(local, DTensor):
        offset, unit, inner, inners = _placed(name, local)
        if apart is not None:
            copy, copies, inner, inners = _copies(local, apart, inner, inners)
        local = local.to_local()
        replica, replicas = replica * inners + inner, replicas * inners
    if stack is not None:
        index, count = stack
        local = local.unsqueeze(0)
        shape, offset, unit = (count, *shape), (index, *offset), (1, *unit)
    return LocalShard(name, shape, offset, local, unit, replica, replicas, copy, copies)


def _copies(tensor: DTensor, apart: tuple[str, int], replica: int, replicas: int) -> tuple[int, int, int, int]:
    """Copy, copies, and replica and replicas of one, where replicas along a mesh dimension, the outermost, are on other nodes."""
    mesh, (name, together) = tensor.device_mesh, apart
    if (mesh.mesh_dim_names or ("",))[0] != name or not isinstance(tensor.placements[0], Replicate):
        return 0, 1, replica, replicas
    each = replicas // mesh.size(0) * together
    return replica // each, replicas // each, replica % each, each


def _placed(name: str, tensor: DTensor) -> tuple[Shape, Shape, int, int]:
    """Offset, unit, replica and replicas of a DTensor's local block."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: this rank is not in the tensor's mesh")
    sizes: list[int] = [mesh.size(dim) for dim in range(mesh.ndim)]
    replica, replicas = 0, 1
    order: dict[int, list[int]] = {}  # tensor dimension: the mesh dimensions that shard it, outermost first
    for dim in reversed(range(mesh.ndim)):
        placement = tensor.placements[dim]
        sharded: int | None = getattr(placement, "dim", None)
        split_factor: int | None = getattr(placement, "split_factor", None)
        if isinstance(placement, Replicate):
            replica, replicas = replica + replicas * coordinate[dim], replicas * sizes[dim]
        elif sharded is not None and split_factor is not None:
            # FSDP2 shards what tensor parallelism has sharded before, although its mesh dimension is further out.
            mine = order.setdefault(sharded, [])
            before = [math.prod(sizes[each] for each in mine[:place]) for place in range(len(mine) + 1)]
            if split_factor not in before:
                raise ValueError(f"{name}: cannot follow the placements {tensor.placements} on the mesh {tuple(sizes)}")
            mine.insert(before.index(split_factor), dim)
        elif sharded is not None and isinstance(placement, Shard):
            order.setdefault(sharded, []).insert(0, dim)
        else:
            raise ValueError(f"{name}: placement {placement} cannot be saved, only Shard and Replicate can")
    offset, unit = [0] * tensor.dim(), [max(1, length) for length in tensor.shape]
    for dim, meshes in order.items():
        splits = [sizes[each] for each in meshes]
        where = [coordinate[each] for each in meshes]
        offset[dim], length = part_of(tensor.shape[dim], splits, where)
        unit[dim] = granule(tensor.shape[dim], tuple(splits))
        if length != tensor.to_local().shape[dim]:
            raise ValueError(
                f"{name}: expected {length} of {tensor.shape[dim]} along dimension {dim} for {tensor.placements}, and this "
                f"rank holds {tensor.to_local().shape[dim]}"
            )
    return tuple(offset), tuple(unit), replica, replicas


def part_of(length: int, splits: Sequence[int], where: Sequence[int]) -> tuple[int, int]:
    """Offset and length of a part, where a length is split again and again: n parts of ceil(length / n), the last ones short."""
    offset = 0
    for parts, index in zip(splits, where, strict=True):
        part = max(1, -(-length // parts))
        start = min(index * part, length)
        offset, length = offset + start, min(part, length - start)
    return offset, length


@lru_cache(maxsize=1024)
def granule(length: int, splits: tuple[int, ...]) -> int:
    """The greatest number of which all boundaries between the parts are multiples; the length itself where there are none."""
    inner = (part_of(length, splits, where)[0] for where in product(*map(range, splits)))
    found = math.gcd(*(offset for offset in inner if offset < length))
    return found or max(1, length)
