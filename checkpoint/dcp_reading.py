"""Reading a checkpoint through torch.distributed.checkpoint.

Owns the translation of DCP's load plans into local shards; `load` reads them, whatever layout wrote the checkpoint.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from checkpoint import manifest, metadata
from checkpoint.dcp_names import PackedObject, described
from checkpoint.layout import ArrayInfo
from checkpoint.loading import load
from checkpoint.local_shard import LocalShard
from checkpoint.naming import step_of

_MORE_BYTES = 1 << 30


class _Read(NamedTuple):
    """One tensor to fill, and what to load for it."""

    item: ReadItem
    target: torch.Tensor
    local_shard: LocalShard


class ZarrReader(StorageReader):
    """Where `dcp.load` reads: a checkpoint of `ZarrWriter`, or of `save`, whose arrays' names are the keys then.

    Each chunk that is read is compared with its checksum. Numbers are converted where the tensor to fill has another type.

    Args:
        path: of a committed checkpoint, ROOT/step-<8 digits>; `newest_good` finds one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._arrays: Mapping[str, ArrayInfo] = {}
        self._tensors: Mapping[str, ArrayInfo] = {}
        self._objects: Mapping[str, PackedObject] = {}

    @property
    def checkpoint_id(self) -> Path:
        """Of the checkpoint that is read."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is something of a checkpoint's name."""
        return step_of(Path(checkpoint_id)) is not None and Path(checkpoint_id).is_dir()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read from another checkpoint, if one is given."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)

    # A parameter called kwargs would be an offer to read metadata of each rank's own, which there is none of.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """What the checkpoint holds. Raises DamagedCheckpoint; CheckpointMismatch where the state's `dcp` is something else."""
        contents = metadata.read(self._path, manifest.read(self._path).files)
        self._arrays = contents.arrays
        self._tensors, self._objects, paths = described(self._path, contents)
        found: dict[str, Any] = {fqn: BytesStorageMetadata() for fqn in self._objects}
        for fqn, info in self._tensors.items():
            size = torch.Size(info.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            found[fqn] = TensorStorageMetadata(TensorProperties(dtype=getattr(torch, info.dtype)), size, [whole])
        return Metadata(found, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Nothing is left to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Fill the tensors, and hand over the objects. Raises DamagedCheckpoint: the tensors' contents are undefined then."""
        for batch in self._batches([item for item in plan.items if item.type is LoadItemType.TENSOR], planner):
            load(self._path, [read.local_shard for read in batch])
            for item, target, local_shard in batch:
                if local_shard.dtype != _dtype_name(target):
                    target.copy_(local_shard.data)
                planner.commit_tensor(item, target)
        self._hand_over([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _batches(self, items: Iterable[ReadItem], planner: LoadPlanner) -> Iterator[list[_Read]]:
        """The items in parts, for tensors of another type than the stored one need as much memory again."""
        batch: list[_Read] = []
        more_bytes = 0
        for item in items:
            info = self._tensors[item.storage_index.fqn]
            data = target = planner.resolve_tensor(item).detach()
            if _dtype_name(target) != info.dtype:
                data = torch.empty(target.shape, dtype=getattr(torch, info.dtype))
                more_bytes += data.nbytes
            local_shard = LocalShard(info.name, info.shape, tuple(item.storage_offsets), data, (1,) * len(info.shape))
            batch.append(_Read(item, target, local_shard))
            if more_bytes >= _MORE_BYTES:
                yield batch
                batch, more_bytes = [], 0
        if batch:
            yield batch

    def _hand_over(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Give the planner its objects; what lies between those of one array is read once and with them."""
        wanted: dict[str, list[tuple[ReadItem, PackedObject]]] = {}
        for item in items:
            place = self._objects[item.storage_index.fqn]
            wanted.setdefault(place.array, []).append((item, place))
        for array, places in wanted.items():
            first = min(place.offset_bytes for _, place in places)
            last = max(place.offset_bytes + place.size_bytes for _, place in places)
            packed = torch.empty(last - first, dtype=torch.uint8)
            load(self._path, [LocalShard(array, self._arrays[array].shape, (first,), packed, (1,))])
            view = packed.numpy().data
            for item, place in places:
                start = place.offset_bytes - first
                planner.load_bytes(item, BytesIO(view[start : start + place.size_bytes]))


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
