"""A buffer in a worker's process: its mappings, and the copy of this rank's tensors into it."""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint import direct, plan
from checkpoint.block import Block
from checkpoint.layout import ArrayInfo, ChunkRun, Shard
from checkpoint.local_shard import LocalShard
from checkpoint.saving import spec_of


@dataclass(frozen=True)
class WritePlan:
    """The chunks of one local shard that this rank writes."""

    info: ArrayInfo
    chunk_runs: Sequence[ChunkRun]

    @classmethod
    def of(cls, local_shard: LocalShard, info: ArrayInfo, ordinal: int) -> "WritePlan":
        return cls(info, list(plan.chunks_to_write(info, ordinal, spec_of(local_shard))) if local_shard.data.numel() else [])


class MappedBuffer:
    """A buffer in this process: for every local shard the tensors in shared memory that its chunks are copied to.

    Invariant: made for one directory as it was when it was mapped (`inode`); a buffer that is made anew is mapped anew.
    """

    def __init__(self, directory: Path, write_plans: Sequence[WritePlan]) -> None:
        self.directory = directory
        self.inode = directory.stat().st_ino
        self._write_plans = write_plans
        self._maps: dict[str, mmap.mmap] = {}
        self._pairs: list[list[tuple[Any, Any]]] = [[] for _ in write_plans]
        self._known: list[tuple[Any, ...]] = [() for _ in write_plans]
        self.size_bytes = 0
        self._pinned: list[int] = []
        for write_plan in write_plans:
            for shard, slot, count in write_plan.chunk_runs:
                direct.populate(self._area(shard), shard.array.offset(slot), count * shard.array.slot_bytes)

    def _area(self, shard: Shard) -> mmap.mmap:
        area = self._maps.get(shard.path)
        if area is None:
            fd = os.open(self.directory / shard.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                area = self._maps[shard.path] = mmap.mmap(fd, shard.size_bytes)
            finally:
                os.close(fd)
        return area

    def _pin(self) -> None:
        """Page-lock the buffer, so that a GPU copies into it by itself; where that is refused, copies take longer."""
        for shard, area in self._maps_of_shards():
            own = [run for run in self._chunk_runs() if run.shard is shard]
            start = shard.array.offset(min(run.slot for run in own)) // direct.PAGE_BYTES * direct.PAGE_BYTES
            size = shard.array.offset(max(run.slot + run.length for run in own)) - start
            address = torch.frombuffer(area, dtype=torch.uint8, offset=start).data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:  # type: ignore[no-untyped-call]
                self._pinned.append(address)

    def _chunk_runs(self) -> Iterator[ChunkRun]:
        for write_plan in self._write_plans:
            yield from write_plan.chunk_runs

    def _maps_of_shards(self) -> list[tuple[Shard, mmap.mmap]]:
        shards = {run.shard.path: run.shard for run in self._chunk_runs()}
        return [(shards[path], area) for path, area in self._maps.items()]

    def close(self) -> None:
        """Unlock what is page-locked."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned = []

    def copy(self, local_shards: Sequence[LocalShard]) -> None:
        """Copy every local shard's chunks."""
        self.size_bytes = 0
        onto_host = any(local_shard.data.is_cuda for local_shard in local_shards)
        if onto_host and not self._pinned:
            self._pin()
        for number, (local_shard, write_plan) in enumerate(zip(local_shards, self._write_plans, strict=True)):
            data = local_shard.data.detach()
            key = (data.data_ptr(), data.dtype, data.stride(), data.device)
            if self._known[number] != key:
                block = Block(local_shard, write_plan.info) if write_plan.chunk_runs else None
                runs = write_plan.chunk_runs
                self._pairs[number] = [pair for run in runs if block for pair in block.pairs(run, self._slots(run))]
                self._known[number] = key
            if data.is_cuda and self._pairs[number]:
                targets, sources = zip(*self._pairs[number], strict=True)
                torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            else:
                for target, source in self._pairs[number]:
                    target[...] = source
            self.size_bytes += sum(source.nbytes for _, source in self._pairs[number])
        if onto_host:
            torch.cuda.synchronize()

    def _slots(self, chunk_run: ChunkRun) -> torch.Tensor:
        """The bytes of a run's slots."""
        array = chunk_run.shard.array
        size = chunk_run.length * array.slot_bytes
        return torch.frombuffer(self._area(chunk_run.shard), dtype=torch.uint8, count=size, offset=array.offset(chunk_run.slot))
