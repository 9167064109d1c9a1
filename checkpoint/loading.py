"""Loading: each rank reads what it needs, from whatever layout wrote it.

Owns the path from the shard files into tensors: only chunks that a local shard touches are read, neighbours together, each once;
each is compared with its checksum, and a bad one is looked for in the next source. No communication takes place.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint import direct, manifest, metadata, slots
from checkpoint.block import Block
from checkpoint.device import Device, device_of
from checkpoint.errors import CheckpointMismatch, DamagedCheckpoint, UnreachableCheckpoint
from checkpoint.layout import ArrayInfo, ChunkRun, Shard
from checkpoint.local_shard import LocalShard
from checkpoint.metadata import Contents
from checkpoint.source import DirectorySource, Source
from checkpoint.state import JSON
from checkpoint.threads import for_each

THREADS = 4
GPU_THREADS = 12  # at most, and as many as there are cores: one reads and checks 4 GB/s, of 12 each 2, and a GPU takes 50
GPU_RUN_BYTES = 16 << 20
"""Read at once, and copied to a GPU as one: what Python does for a run would take longer than a smaller one's bytes."""

Seals = dict[str, dict[int, int]]
"""crc32c of each chunk that was read, by the shard file's path and slot."""


class _Run(NamedTuple):
    """Slots that are neighbours in one source, to be read at once, and the blocks that want something of them."""

    chunk_run: ChunkRun
    wanted: Sequence[tuple[ChunkRun, Block]]
    source: Source


def read_state(path: Path) -> Mapping[str, JSON]:
    """The small state that was saved with a checkpoint. Raises DamagedCheckpoint."""
    return contents_of(path)[0].state


def load(path: Path, local_shards: Sequence[LocalShard], *, threads: int | None = None) -> Mapping[str, JSON]:
    """Fill the local shards' tensors in place from a checkpoint, whatever layout wrote it; return the state saved with it.

    Args:
        path: a committed checkpoint.
        local_shards: what this rank wants; blocks may lie anywhere in their arrays, and overlap.
        threads: that read and check at the same time; None: as many as are worth it.

    Raises DamagedCheckpoint where what is read is not what was written (the tensors' contents are undefined then), and
    CheckpointMismatch, before any tensor changes, where an array is missing or has another shape or type.
    """
    with closing(Opened(path)) as opened:
        opened.fill(local_shards, threads=threads)
    return opened.contents.state


class Opened:
    """A committed checkpoint from which one local shard after the other is read, and its metadata once; threads may share it.

    Raises DamagedCheckpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contents, self._source = contents_of(path)

    def fill(self, local_shards: Sequence[LocalShard], *, threads: int | None = None) -> None:
        """Fill the local shards' tensors in place. Raises as `load`."""
        fill(self.path, self.contents, [self._source], local_shards, threads=threads)

    def close(self) -> None:
        """Give back what is open."""
        self._source.close()


def contents_of(path: Path) -> tuple[Contents, Source]:
    """What a committed checkpoint holds, and its chunks. Raises DamagedCheckpoint."""
    files = manifest.read(path).files
    return metadata.read(path, files), DirectorySource(path, files=files)


def fill(
    path: Path,
    contents: Contents,
    sources: Iterable[Source],
    local_shards: Sequence[LocalShard],
    *,
    threads: int | None = None,
) -> Seals:
    """Fill the local shards' tensors from the sources, the first that holds a chunk first; return the checksums of what was read.

    Args:
        path: what messages call the checkpoint.
        sources: gone through again for each chunk, by all threads, and no further than to the first that holds it.

    Raises as `load`.
    """
    for local_shard in local_shards:
        _check(path, contents, local_shard)
    wanted = [local_shard for local_shard in local_shards if local_shard.data.numel()]
    on_gpu = device_of([local_shard.data for local_shard in wanted])
    runs = list(_runs(path, contents, sources, wanted, on_gpu))
    run_bytes = max((run.chunk_run.length * run.chunk_run.shard.array.slot_bytes for run in runs), default=0)
    reader = _Reader(sources, run_bytes, on_gpu)
    try:
        for_each(runs, reader.worker, min(threads or _threads_for(on_gpu), len(runs)), "checkpoint-load")
    finally:
        reader.finish()
    return reader.seals


def _threads_for(device: Device | None) -> int:
    """How many threads read."""
    return THREADS if device is None else min(GPU_THREADS, len(os.sched_getaffinity(0)))


def _check(path: Path, contents: Contents, local_shard: LocalShard) -> None:
    info = contents.arrays.get(local_shard.array)
    if info is None:
        raise CheckpointMismatch(
            f"{path} has no array {local_shard.array}; it has {len(contents.arrays)} others. "
            "Was it written for another model, or the array renamed?"
        )
    if (info.shape, info.dtype) != (local_shard.shape, local_shard.dtype):
        raise CheckpointMismatch(
            f"{path}: array {local_shard.array}: expected {local_shard.dtype} {list(local_shard.shape)}, found {info.dtype} "
            f"{list(info.shape)}. Load it into the model and precision that it was written for"
        )


def _runs(
    path: Path, contents: Contents, sources: Iterable[Source], local_shards: Sequence[LocalShard], device: Device | None
) -> Iterator[_Run]:
    """What to read, by file and offset."""
    wanted: dict[Shard, list[tuple[ChunkRun, Block]]] = {}
    run_bytes = slots.RUN_BYTES if device is None else GPU_RUN_BYTES
    for local_shard in local_shards:
        info = contents.arrays[local_shard.array]
        block = Block(local_shard, info, as_tensors=device is not None and device.holds(local_shard.data))
        for chunk_run in info.chunk_runs(local_shard.offset, local_shard.extent):
            wanted.setdefault(chunk_run.shard, []).append((chunk_run, block))
    for shard, chunk_runs in wanted.items():
        chunk_runs.sort(key=lambda each: each[0].slot)
        at_once = _chunks_of(shard.array, run_bytes)
        for whole in _together(chunk_run for chunk_run, _ in chunk_runs):
            slot, end = whole.slot, whole.slot + whole.length
            while slot < end:
                next_ones = whole.part(slot, slot + at_once)
                found = next(((source, count) for source in sources if (count := source.stretch(next_ones))), None)
                if found is None:
                    raise DamagedCheckpoint(path, f"{_chunk(shard, slot)} is nowhere to be had")
                source, count = found
                run = next_ones.part(slot, slot + count)
                yield _Run(run, [each for each in chunk_runs if each[0].part(slot, slot + count).length], source)
                slot += count


def _chunks_of(array: ArrayInfo, run_bytes: int) -> int:
    """How many chunks are a run: of so many bytes without checksums, so that runs begin where rows of chunks do.

    With what is between them it is at most twice that.
    """
    return max(1, min(run_bytes // array.chunk_bytes, 2 * run_bytes // array.slot_bytes))


def _together(chunk_runs: Iterable[ChunkRun]) -> Iterator[ChunkRun]:
    """Runs of one file, ascending, as few that have the same chunks; each chunk once."""
    before: ChunkRun | None = None
    for chunk_run in chunk_runs:
        if before is not None and chunk_run.slot <= before.slot + before.length:
            end = max(before.slot + before.length, chunk_run.slot + chunk_run.length)
            before = ChunkRun(before.shard, before.slot, end - before.slot)
        else:
            if before is not None:
                yield before
            before = chunk_run
    if before is not None:
        yield before


def _chunk(shard: Shard, slot: int) -> str:
    """What messages call a chunk."""
    place, _ = next(ChunkRun(shard, slot, 1).boxes())
    return f"chunk {place} of {shard.array.name} (slot {slot} of {shard.path})"


class _Staging:
    """What one thread reads into: fresh pages would cost more than the reading. For a GPU twice, page-locked.

    The GPU copies out of one half while the thread reads into the other. What it copies goes to its own memory as it was read, and
    from there to where it belongs: so each takes the host two calls, however many chunks it has.

    Args:
        stage: bytes of the GPU's memory, which threads share: its copies run one behind the other. Empty where it has no room, and
            each chunk is a copy of its own.
    """

    def __init__(self, run_bytes: int, device: Device | None, stage: torch.Tensor) -> None:
        self._device, self._stage = device, stage
        halves = 1 if device is None else 2
        self._buffers = [torch.frombuffer(direct.memory(run_bytes), dtype=torch.uint8) for _ in range(halves)]
        self._marks: list[object | None] = [None] * halves
        self._locked = []
        for each in self._buffers if device is not None else ():
            pages = -(-len(each) // direct.PAGE_BYTES) * direct.PAGE_BYTES
            if pages and device is not None and device.register(each.data_ptr(), pages):
                self._locked.append(each.data_ptr())
        self._next = 0

    def memory(self) -> torch.Tensor:
        """To read into; what a GPU has had to copy out of it is there."""
        self._next = (self._next + 1) % len(self._buffers)
        self._wait(self._next)
        return self._buffers[self._next]

    def scatter(self, whole: ChunkRun, parts: Sequence[tuple[ChunkRun, Block]]) -> None:
        """Copy parts of the run that was read last into blocks."""
        size = whole.shard.array.slot_bytes
        device, read = self._device, self._buffers[self._next]
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        on_gpu = self._stage if len(self._stage) >= whole.length * size else None
        for part, block in parts:
            start = (part.slot - whole.slot) * size
            here = slice(start, start + part.length * size)
            if device is None or not block.as_tensors:
                block.scatter(part, read[here])
                continue
            pairs = block.pairs(part, read[here]) if on_gpu is None else block.boxes(part, on_gpu[here])
            for source, target in pairs:
                sources.append(source)
                targets.append(target)
        if device is None or not targets:
            return
        if on_gpu is None:
            device.copy(targets, sources)
        else:
            there = slice(0, whole.length * size)
            device.unpack(read[there], on_gpu[there], targets, sources)
        self._marks[self._next] = device.mark()

    def close(self) -> None:
        """Wait until all copies are there. Raises RuntimeError where the GPU has failed."""
        for number in range(len(self._buffers)):
            self._wait(number)
        for address in self._locked:
            if self._device is not None:
                self._device.unregister(address)

    def _wait(self, number: int) -> None:
        mark, self._marks[number] = self._marks[number], None
        if mark is not None and self._device is not None:
            self._device.wait(mark)


class _Reader:
    """Reads runs.

    Args:
        device: the GPU that local shards are on; None: they are on the CPU.
    """

    def __init__(self, sources: Iterable[Source], run_bytes: int, device: Device | None) -> None:
        self._sources = sources
        self._run_bytes, self._device = run_bytes, device
        self._stage = device.stage() if device is not None and run_bytes else torch.empty(0, dtype=torch.uint8)
        self._staged: list[_Staging] = []
        self.seals: Seals = {}
        self._lock = threading.Lock()
        # Each call of torch lets go of Python's lock; threads that all asked the GPU took three times as long, for it went round.
        self._asking = threading.Lock() if device is not None else nullcontext()

    def worker(self) -> Callable[[_Run], None]:
        """What one thread does with a run: fill the tensors from it. It raises DamagedCheckpoint."""
        buffer = _Staging(self._run_bytes, self._device, self._stage)
        with self._lock:
            self._staged.append(buffer)

        def read(run: _Run) -> None:
            try:
                self._read(run.chunk_run, run.wanted, run.source, buffer)
            except DamagedCheckpoint as error:
                if len(list(islice(self._sources, 2))) == 1:
                    raise
                self._one_by_one(run, buffer, error)

        return read

    def finish(self) -> None:
        """Wait until what GPUs copy is there."""
        for each in self._staged:
            each.close()

    def _one_by_one(self, run: _Run, buffer: _Staging, error: DamagedCheckpoint) -> None:
        """Each chunk from the first source in which it is sound."""
        shard = run.chunk_run.shard
        for slot in range(run.chunk_run.slot, run.chunk_run.slot + run.chunk_run.length):
            for source in self._sources:
                try:
                    if source.holds(shard, slot):
                        self._read(ChunkRun(shard, slot, 1), run.wanted, source, buffer)
                        break
                except DamagedCheckpoint as another:
                    if not isinstance(error, UnreachableCheckpoint):  # which may be sound
                        error = another
            else:
                raise error

    def _read(self, chunk_run: ChunkRun, wanted: Sequence[tuple[ChunkRun, Block]], source: Source, buffer: _Staging) -> None:
        shard, first, count = chunk_run
        size = shard.array.slot_bytes
        whole = buffer.memory()[: count * size]
        view = whole.numpy().data
        source.read(shard, first, view)
        bad = slots.unsound(shard.array, view)
        if bad is not None:
            raise DamagedCheckpoint(source.path, f"{_chunk(shard, first + bad[0])} {bad[1]}")
        seals = dict(zip(range(first, first + count), slots.seals(shard.array, view), strict=True))
        for slot, seal in seals.items():
            if source.expected(shard, slot) not in (None, seal):
                raise DamagedCheckpoint(source.path, f"{_chunk(shard, slot)} is sound, but not the one that was written")
        parts = ((each.part(first, first + count), block) for each, block in wanted)
        with self._asking:
            buffer.scatter(chunk_run, [(part, block) for part, block in parts if part.length])
        with self._lock:
            self.seals.setdefault(shard.path, {}).update(seals)
