"""torch.distributed.checkpoint over this format: `dcp.save`, `dcp.async_save` and `dcp.load` with a checkpoint in Zarr v3.

Owns the translation between DCP's plans and the arrays of a checkpoint. Layout, writing, commit and reading are those of `save`
and `load`, so a checkpoint is there whole or not at all, and a byte that has changed is found.

    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=ZarrWriter(root, step, generation=0))
    dcp.load(state, storage_reader=ZarrReader(path))

DCP tells failures in its own way: a `dcp.api.CheckpointException` on all ranks, with the exception of each rank that failed.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from checkpoint import commit, metadata, plan, safe_name, writing
from checkpoint.block import Block
from checkpoint.dcp_names import KEY, OBJECTS, PackedObject, array_name, fqn_of, paths_of
from checkpoint.dcp_reading import ZarrReader
from checkpoint.errors import CheckpointError
from checkpoint.layout import ArrayInfo, Shape, Shard, arrange
from checkpoint.local_shard import LocalShard
from checkpoint.manifest import Manifest
from checkpoint.naming import step_of, step_path, temporary_path
from checkpoint.plan import ShardSpec
from checkpoint.state import JSON
from checkpoint.writing import Checksums, Task

__all__ = ["ZarrReader", "ZarrWriter"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Orders:
    """What the coordinator tells a rank: the layout of the rank's arrays by fqn, and the array for its objects."""

    arrays: Mapping[str, ArrayInfo]
    objects: str


@dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator."""

    checksums: Checksums
    packed: ArrayInfo | None
    objects: Mapping[str, PackedObject]


class ZarrWriter(StorageWriter):
    """Where `dcp.save` and `dcp.async_save` write the checkpoint of a step.

    A sound checkpoint of the step that is there already is left as it is. Older checkpoints stay: see `prune`.

    Args:
        root: where checkpoints are, on a file system that all ranks share.
        step: 0 to 99999999; None where each save is given a `checkpoint_id` instead: the path ROOT/step-<8 digits>.
        generation: of the attempt that saves; an old one cannot commit.
    """

    def __init__(self, root: str | os.PathLike[str], step: int | None = None, *, generation: int = 0) -> None:
        self._root = Path(root)
        self._step = step
        self._generation = generation
        self._arrays: tuple[ArrayInfo, ...] | None = None  # the coordinator's, while a save is under way

    @property
    def checkpoint_id(self) -> Path:
        """Where the checkpoint will be. Raises ValueError without a step."""
        return step_path(self._root, self._known_step)

    @property
    def _known_step(self) -> int:
        if self._step is None:
            raise ValueError("which step? give ZarrWriter a step, or the save a checkpoint_id ROOT/step-<8 digits>")
        return self._step

    @property
    def _temporary(self) -> Path:
        return temporary_path(self._root, self._known_step, self._generation)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path ROOT/step-<8 digits>."""
        return step_of(Path(checkpoint_id)) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, of the step that the path names if there is one. Raises ValueError for another path."""
        self._arrays = None
        if checkpoint_id is not None:
            step = step_of(Path(checkpoint_id))
            if step is None:
                raise ValueError(f"a checkpoint is called ROOT/step-<8 digits>, not {os.fspath(checkpoint_id)}")
            self._root, self._step = Path(checkpoint_id).parent, step

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, use_collectives: bool = True, **kwargs: Any) -> None:
        """Check what was asked for. Raises ValueError without a step, CheckpointError without collectives."""
        self._temporary  # noqa: B018 - raises
        if not use_collectives:
            raise CheckpointError("ranks that do not speak with one another cannot write one checkpoint; use collectives")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay out the arrays, and open the temporary directory with files for all tensors.

        Raises CheckpointError where the plans contradict each other or leave a gap; ValueError for a name that is too long;
        StaleGeneration; OSError.
        """
        if not all(each.usable for each in plans):
            raise CheckpointError("the planner sent only what has changed; plan with enable_plan_caching=False")
        self._arrays = None
        if commit.good(self._root, self._known_step) is not None:
            _log.warning("%s is there already and sound; it is left as it is", self.checkpoint_id)
            return [replace(each, storage_data=None) for each in plans]
        arrays = plan.plan(_specs(plans))
        # Copies without what has been worked out about them, for they travel.
        known = {fqn_of(info.name): replace(info) for info in arrays}
        ordered = []
        for rank, each in enumerate(plans):
            names = {item.index.fqn for item in each.items if item.type is not WriteItemType.BYTE_IO}
            orders = _Orders({name: known[name] for name in names}, f"{OBJECTS}/{rank}")
            ordered.append(replace(each, storage_data=orders))
        documents = {path: text for path, text in _documents(arrays).items() if path != metadata.NAME}
        try:
            commit.open_temporary(self._root, self._known_step, self._generation, _shards(arrays), documents)
        except Exception:
            self._discard()
            raise
        self._arrays = arrays
        return ordered

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's items; durable when it returns. Raises OSError; ValueError for what Zarr has no type for."""
        results: Future[list[WriteResult]] = Future()
        orders: _Orders | None = plan.storage_data
        if orders is None:
            results.set_result([])
            return results
        try:
            written, size_bytes = self._write(plan, planner, orders)
        except Exception:
            self._discard()  # nobody else can save this any more
            raise
        results.set_result([WriteResult(MetadataIndex(""), size_bytes, written)])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint. Raises StaleGeneration; OSError; ValueError where the planner's data is not JSON."""
        if self._arrays is None:
            return
        try:
            self._publish(self._arrays, metadata.planner_data, [each.storage_data for share in results for each in share])
        except Exception:
            self._discard()
            raise
        finally:
            self._arrays = None

    def _write(self, plan: SavePlan, planner: SavePlanner, orders: _Orders) -> tuple[_Written, int]:
        local_shards: list[tuple[LocalShard, ArrayInfo]] = []
        objects: dict[str, PackedObject] = {}
        packed = bytearray()
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                info = orders.arrays[item.index.fqn]
                local_shards.append((_local_shard(item, info, data), info))
            else:
                objects[item.index.fqn] = PackedObject(orders.objects, len(packed), data.getbuffer().nbytes)
                packed += data.getbuffer()
        array = None
        if objects:
            array = arrange(orders.objects, "uint8", (len(packed),), (max(1, len(packed)),))
            _create(self._temporary, array)
            contents = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.empty(0, dtype=torch.uint8)
            local_shards.append((LocalShard(array.name, array.shape, (0,), contents, array.chunk), array))
        pinned = any(local_shard.data.is_cuda for local_shard, _ in local_shards)
        tasks = [task for local_shard, info in local_shards for task in _tasks(local_shard, info)]
        checksums = writing.write(self._temporary, tasks, pinned=pinned)
        size_bytes = sum(local_shard.data.nbytes for local_shard, _ in local_shards)
        return _Written(checksums, None if array is None else replace(array), objects), size_bytes

    def _publish(self, arrays: tuple[ArrayInfo, ...], planner_data: Any, shares: Sequence[_Written]) -> None:
        packed = tuple(share.packed for share in shares if share.packed is not None)
        objects: dict[str, JSON] = {fqn: place for share in shares for fqn, place in share.objects.items()}
        state: dict[str, JSON] = {KEY: {"paths": paths_of(planner_data), "objects": objects}}
        known, added = _documents(arrays), metadata.documents(packed)
        root = json.loads(known[metadata.NAME])
        root["consolidated_metadata"]["metadata"] |= json.loads(added[metadata.NAME])["consolidated_metadata"]["metadata"]
        added[metadata.NAME] = metadata.with_attributes(json.dumps(root).encode(), self._known_step, self._generation, state)
        for path, text in added.items():
            _write_durably(self._temporary / path, text)
        checksums = writing.merged([share.checksums for share in shares])
        files = commit.entries({**known, **added}, _shards((*arrays, *packed)), checksums)
        commit.commit(self._root, self._generation, Manifest(self._known_step, self._generation, files))

    def _discard(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


def _specs(plans: Sequence[SavePlan]) -> list[list[ShardSpec]]:
    """What each rank is to write, in units that fit all of them."""
    found: dict[str, list[tuple[int, ShardSpec]]] = {}
    for rank, each in enumerate(plans):
        for item in each.items:
            if item.tensor_data is not None:
                chunk, dtype = item.tensor_data.chunk, str(item.tensor_data.properties.dtype).removeprefix("torch.")
                shape, offset, extent = tuple(item.tensor_data.size), tuple(chunk.offsets), tuple(chunk.sizes)
                name = safe_name.array_name(array_name(item.index.fqn), shape)
                spec = ShardSpec(name, dtype, shape, offset, extent, (), 0, 1)
                found.setdefault(item.index.fqn, []).append((rank, spec))
    specs: list[list[ShardSpec]] = [[] for _ in plans]
    for held in found.values():
        unit = _unit([spec for _, spec in held])
        for rank, spec in held:
            specs[rank].append(replace(spec, unit=unit))
    return specs


def _unit(specs: Sequence[ShardSpec]) -> Shape:
    """The greatest numbers of which all boundaries inside the array are multiples."""
    full = [spec for spec in specs if math.prod(spec.extent)]
    return tuple(
        math.gcd(*(end for spec in full for end in (spec.offset[dim], spec.offset[dim] + spec.extent[dim]) if end < length))
        or max(1, length)
        for dim, length in enumerate(specs[0].shape)
    )


def _local_shard(item: WriteItem, info: ArrayInfo, data: torch.Tensor) -> LocalShard:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    local_shard = LocalShard(info.name, info.shape, tuple(chunk.offsets), data.detach(), info.chunk)
    if (local_shard.dtype, local_shard.extent) != (info.dtype, tuple(chunk.sizes)):
        raise ValueError(
            f"{item.index.fqn}: expected {info.dtype} {list(chunk.sizes)} as planned, and the planner gives {local_shard.dtype} "
            f"{list(local_shard.extent)}"
        )
    return local_shard


def _tasks(local_shard: LocalShard, info: ArrayInfo) -> Iterator[Task]:
    if local_shard.data.numel():
        block = Block(local_shard, info)
        for chunk_run in info.chunk_runs(local_shard.offset, local_shard.extent):
            yield Task(chunk_run, block)


def _shards(arrays: Iterable[ArrayInfo]) -> list[Shard]:
    return [shard for info in arrays for shard in info.shards.values()]


def _create(directory: Path, array: ArrayInfo) -> None:
    """Files of full size with their index and no chunks, of an array that the coordinator could not know the length of."""
    path = directory / array.name
    path.parent.mkdir(exist_ok=True)  # only inside a directory that no failed rank has removed
    path.mkdir()
    for shard in array.shards.values():
        with (directory / shard.path).open("xb") as file:
            file.write(shard.index)
            file.truncate(shard.size_bytes)


def _write_durably(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@lru_cache(maxsize=4)
def _documents(arrays: tuple[ArrayInfo, ...]) -> Mapping[str, bytes]:
    """Every `zarr.json`; the tensors' are the same from save to save."""
    return metadata.documents(arrays)
