"""A buffer in a worker's process: its mappings, and the copy of this rank's tensors into it."""

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint import direct, plan
from checkpoint.block import Block
from checkpoint.device import Device
from checkpoint.layout import ArrayInfo, ChunkRun, Shard
from checkpoint.local_shard import LocalShard
from checkpoint.rounds import Numbered
from checkpoint.saving import spec_of
from checkpoint.tiers.gathering import Gathering


@dataclass(frozen=True)
class WritePlan:
    """The chunks of one local shard that this rank writes."""

    info: ArrayInfo
    chunk_runs: Sequence[ChunkRun]

    @classmethod
    def of(cls, local_shard: LocalShard, info: ArrayInfo, ordinal: int) -> "WritePlan":
        wanted = plan.chunks_to_write(info, ordinal, spec_of(local_shard).for_snapshots) if local_shard.data.numel() else ()
        return cls(info, list(wanted))


def own_ranges(chunk_runs: Iterable[ChunkRun]) -> dict[str, list[tuple[int, int]]]:
    """By file, the pages of these runs as ascending (offset, bytes): what a GPU copies into.

    Each range costs a call of the driver, so that a run is one, with the page for the checksum behind each chunk. Pages of other
    ranks, which lie between the layers of a stacked array, are never in one.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for run in chunk_runs:
        array, pages = run.shard.array, direct.PAGE_BYTES
        first = array.offset(run.slot) // pages * pages
        last = array.offset(run.slot + run.length)
        found.setdefault(run.shard.path, []).append((first, -(-last // pages) * pages - first))
    return {path: _joined(ranges) for path, ranges in found.items()}


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending, and those that meet as one."""
    joined: list[tuple[int, int]] = []
    for first, size in sorted(ranges):
        if joined and first <= sum(joined[-1]):
            start, before = joined.pop()
            joined.append((start, max(before, first + size - start)))
        else:
            joined.append((first, size))
    return joined


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class Replaced:
    """Local shards whose tensor was replaced by one that lies elsewhere, as states are that an optimizer binds anew in each step.

    Known over all buffers of a rank, which take turns. Attributes: numbers: of these local shards.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self._places: dict[int, tuple[Any, ...]] = {}

    def seen(self, number: int, place: tuple[Any, ...]) -> None:
        """A local shard is copied from there."""
        if self._places.setdefault(number, place) != place:
            self._places[number] = place
            self.numbers.add(number)


class MappedBuffer:
    """A buffer in this process: for every local shard the tensors in shared memory that its chunks are copied to.

    Invariant: made for one directory as it was when it was mapped (`is_at`); a buffer that is made anew is mapped anew.

    Args:
        device: the GPU that tensors are copied from; None: they are on the CPU.
        replaced: what is told of where they lie.
    """

    def __init__(
        self,
        directory: Path,
        write_plans: Sequence[WritePlan],
        device: Device | None = None,
        replaced: Replaced | None = None,
    ) -> None:
        self.directory = directory
        pinned = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # or another directory could get its inode number
        self._unpin = weakref.finalize(self, os.close, pinned)
        self._identity = _identity(os.fstat(pinned))
        self._write_plans = write_plans
        self._maps: dict[str, mmap.mmap] = {}
        self._pairs: list[list[tuple[Any, Any]]] = [[] for _ in write_plans]
        self._known: list[tuple[Any, ...]] = [() for _ in write_plans]
        self._sizes = [0 for _ in write_plans]
        self._kinds: list[bool | None] = [None for _ in write_plans]
        self._gatherings: dict[bool, Gathering] = {}
        self.size_bytes = 0
        self._device = device
        self._replaced = replaced or Replaced()
        self._registered: list[int] = []
        try:
            for write_plan in write_plans:
                for shard, slot, count in write_plan.chunk_runs:
                    direct.populate(self._area(shard), shard.array.offset(slot), count * shard.array.slot_bytes)
            if device is not None:  # now, and not while training waits for the first snapshot
                self._register(device)
                device.stage()
        except (OSError, RuntimeError):
            self.close()  # or pages would stay locked where others are mapped later
            raise

    def _area(self, shard: Shard) -> mmap.mmap:
        area = self._maps.get(shard.path)
        if area is None:
            fd = os.open(self.directory / shard.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                area = self._maps[shard.path] = mmap.mmap(fd, shard.size_bytes)
            finally:
                os.close(fd)
        return area

    def _register(self, device: Device) -> None:
        """Page-lock this rank's own pages of the buffer; those of other ranks, and holes, stay as they are."""
        for path, ranges in own_ranges(run for each in self._write_plans for run in each.chunk_runs).items():
            area = self._maps[path]
            address = torch.frombuffer(area, dtype=torch.uint8, count=1).data_ptr()
            for first, size in ranges:
                if device.register(address + first, size):
                    self._registered.append(address + first)
                    direct.unmap_pages(area, first, size)  # the GPU has the pages, and they stay where they are

    def is_at(self, directory: Path) -> bool:
        """Whether it is the buffer that is there now. Raises OSError."""
        return self._unpin.alive and self._identity == _identity(directory.stat())

    def close(self) -> None:
        """Unlock what is page-locked, and unmap: pages of files that are deleted by then are free, and not at some later time."""
        for address in self._registered:
            if self._device is not None:
                self._device.unregister(address)
        self._registered = []
        self._known = [() for _ in self._write_plans]
        self._pairs = [[] for _ in self._write_plans]
        self._gatherings = {}
        self._kinds = [None for _ in self._write_plans]
        self._maps = {}
        self._unpin()

    def copy(self, local_shards: Sequence[LocalShard], late: Sequence[bool] = ()) -> object | None:
        """Copy every local shard's chunks. What comes from a GPU is there once it has passed the mark that is returned.

        Args:
            late: for each, whether it changes only after the GPU was held back for that mark; from others it is held back here.
                None are where there is none.
        """
        device = self._device
        blocks = [each.data.detach() for each in local_shards]
        onto_host = [device is not None and device.holds(data) for data in blocks]
        self._sort([(bool(late) and late[number]) if each else None for number, each in enumerate(onto_host)])
        for number, (local_shard, write_plan, data) in enumerate(zip(local_shards, self._write_plans, blocks, strict=True)):
            key = (data.data_ptr(), data.dtype, data.stride(), data.device)
            if write_plan.chunk_runs:
                self._replaced.seen(number, key)
            if self._known[number] != key and write_plan.chunk_runs:
                block, kind = Block(local_shard, write_plan.info, as_tensors=onto_host[number]), self._kinds[number]
                if kind is None:
                    pairs = [pair for run in write_plan.chunk_runs for pair in block.pairs(run, self._slots(run))]
                    self._pairs[number], self._sizes[number] = pairs, sum(source.nbytes for _, source in pairs)
                else:
                    self._sizes[number] = self._gatherings[kind].renew(number, block)
                self._known[number] = key
            for target, source in self._pairs[number]:
                target[...] = source
        self.size_bytes = sum(self._sizes)
        if device is None:
            return None
        for kind, gathering in sorted(self._gatherings.items()):
            gathering.begin(device, hold_back=not kind)
        return device.mark()

    def let_go(self, numbers: Iterable[int]) -> None:
        """Hold the tensors of these local shards no longer; all copies of them are there."""
        for number in numbers:
            self._known[number], self._pairs[number] = (), []
            for gathering in self._gatherings.values():
                gathering.let_go(number)

    def _sort(self, kinds: list[bool | None]) -> None:
        """Of each local shard: whether it is late; None: it is on the CPU. What was known of others does not hold."""
        device = self._device
        if device is None or kinds == self._kinds:
            return
        self._kinds = kinds
        self._known = [() for _ in kinds]
        self._pairs = [[] for _ in kinds]
        runs = [Numbered(number, run) for number, each in enumerate(self._write_plans) for run in each.chunk_runs]
        self._gatherings = {
            kind: Gathering([each for each in runs if kinds[each.number] is kind], self._slots, device.stage())
            for kind in (False, True)
            if kind in kinds
        }

    def _slots(self, chunk_run: ChunkRun) -> torch.Tensor:
        """The bytes of a run's slots."""
        array = chunk_run.shard.array
        size = chunk_run.length * array.slot_bytes
        return torch.frombuffer(self._area(chunk_run.shard), dtype=torch.uint8, count=size, offset=array.offset(chunk_run.slot))
