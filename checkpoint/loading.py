"""Loading: each rank reads what it needs, from whatever layout wrote it.

Owns the path from the shard files into tensors: only chunks that a piece touches are read, neighbours together, each once; each
is compared with its checksum, and a bad one is looked for in the next source. No communication takes place.
"""

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import crc32c
import torch

from checkpoint import direct, manifest, metadata
from checkpoint.block import Block
from checkpoint.errors import CheckpointMismatch, DamagedCheckpoint
from checkpoint.layout import CRC_BYTES, ArrayInfo, Shape, Shard
from checkpoint.metadata import Contents
from checkpoint.piece import Piece
from checkpoint.source import DirectorySource, Source
from checkpoint.state import JSON

RUN_BYTES = 8 << 20
THREADS = 3

Seals = dict[str, dict[int, int]]
"""crc32c of each chunk that was read, by the shard file's path and slot."""


@dataclass(frozen=True)
class _Task:
    """One chunk to read, for all blocks that touch it."""

    slot: int
    chunk: Shape
    blocks: Sequence[Block]


@dataclass(frozen=True)
class _Run:
    """Chunks whose slots are neighbours in one source, to be read at once."""

    shard: Shard
    tasks: Sequence[_Task]
    sources: Sequence[Source]  # the first has all of them


def read_state(path: Path) -> Mapping[str, JSON]:
    """The small state that was saved with a checkpoint. Raises DamagedCheckpoint."""
    return contents_of(path)[0].state


def load(path: Path, pieces: Sequence[Piece], *, threads: int = THREADS) -> Mapping[str, JSON]:
    """Fill the pieces' tensors in place from a checkpoint, whatever layout wrote it; return the state saved with it.

    Args:
        path: a committed checkpoint.
        pieces: what this rank wants; blocks may lie anywhere in their arrays, and overlap.
        threads: that read and check at the same time.

    Raises DamagedCheckpoint where what is read is not what was written (the tensors' contents are undefined then), and
    CheckpointMismatch, before any tensor changes, where an array is missing or has another shape or type.
    """
    with closing(Opened(path)) as opened:
        opened.fill(pieces, threads=threads)
    return opened.contents.state


class Opened:
    """A committed checkpoint from which piece after piece is read, and its metadata once; threads may share it.

    Raises DamagedCheckpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contents, self._source = contents_of(path)

    def fill(self, pieces: Sequence[Piece], *, threads: int = THREADS) -> None:
        """Fill the pieces' tensors in place. Raises as `load`."""
        fill(self.path, self.contents, [self._source], pieces, threads=threads)

    def close(self) -> None:
        """Give back what is open."""
        self._source.close()


def contents_of(path: Path) -> tuple[Contents, Source]:
    """What a committed checkpoint holds, and its chunks. Raises DamagedCheckpoint."""
    files = manifest.read(path).files
    return metadata.read(path, files.get(metadata.NAME)), DirectorySource(path, files=files)


def fill(path: Path, contents: Contents, sources: Sequence[Source], pieces: Sequence[Piece], *, threads: int = THREADS) -> Seals:
    """Fill the pieces' tensors from the sources, the first that holds a chunk first; return the checksums of what was read.

    Args:
        path: what messages call the checkpoint.

    Raises as `load`.
    """
    for piece in pieces:
        _check(path, contents, piece)
    runs = list(_runs(path, contents, sources, [piece for piece in pieces if piece.data.numel()]))
    reader = _Reader(path)
    if runs:
        with ThreadPoolExecutor(min(threads, len(runs)), thread_name_prefix="checkpoint-load") as pool:
            work = [pool.submit(reader.read, run) for run in runs]
            try:
                for each in work:
                    each.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    return reader.seals


def _check(path: Path, contents: Contents, piece: Piece) -> None:
    info = contents.arrays.get(piece.array)
    if info is None:
        raise CheckpointMismatch(
            f"{path} has no array {piece.array}; it has {len(contents.arrays)} others. "
            "Was it written for another model, or the array renamed?"
        )
    if (info.shape, info.dtype) != (piece.shape, piece.dtype):
        raise CheckpointMismatch(
            f"{path}: array {piece.array}: expected {piece.dtype} {list(piece.shape)}, found {info.dtype} "
            f"{list(info.shape)}. Load it into the model and precision that it was written for"
        )


def _runs(path: Path, contents: Contents, sources: Sequence[Source], pieces: Sequence[Piece]) -> Iterator[_Run]:
    """What to read, by file and offset."""
    wanted: dict[Shard, dict[int, tuple[Shape, list[Block]]]] = {}
    for piece in pieces:
        info = contents.arrays[piece.array]
        block = Block(piece, info)
        for chunk in info.touched(piece.offset, piece.extent):
            shard, slot = info.locate(chunk)
            wanted.setdefault(shard, {}).setdefault(slot, (chunk, []))[1].append(block)
    for shard, slots in wanted.items():
        at_once = max(1, RUN_BYTES // shard.array.slot_bytes)
        run: list[_Task] = []
        among: list[Source] = []
        for slot, (chunk, blocks) in sorted(slots.items()):
            holders = [source for source in sources if source.holds(shard, slot)]
            if not holders:
                raise DamagedCheckpoint(path, f"chunk {chunk} of {shard.array.name} is nowhere to be had")
            if run and (slot != run[-1].slot + 1 or len(run) == at_once or holders != among):
                yield _Run(shard, run, among)
                run = []
            among = holders
            run.append(_Task(slot, chunk, blocks))
        yield _Run(shard, run, among)


class _Reader:
    """Reads runs; each thread has one buffer, for fresh pages would cost more than the reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = threading.local()
        self.seals: Seals = {}
        self._lock = threading.Lock()

    def read(self, run: _Run) -> None:
        """Fill the tensors from one run. Raises DamagedCheckpoint."""
        try:
            self._read(run.shard, run.tasks, run.sources[0])
        except DamagedCheckpoint as error:
            if len(run.sources) == 1:
                raise
            self._one_by_one(run, error)

    def _one_by_one(self, run: _Run, error: DamagedCheckpoint) -> None:
        """Each chunk from the first source in which it is sound."""
        for task in run.tasks:
            for source in run.sources:
                try:
                    self._read(run.shard, [task], source)
                    break
                except DamagedCheckpoint as another:
                    error = another
            else:
                raise error

    def _read(self, shard: Shard, tasks: Sequence[_Task], source: Source) -> None:
        array = shard.array
        whole = self._buffer(len(tasks) * array.slot_bytes)
        view = whole.numpy().data
        source.read(shard, tasks[0].slot, view)
        seals = {}
        for number, task in enumerate(tasks):
            start = number * array.slot_bytes
            seals[task.slot] = self._sound(shard, task, source, view[start : start + array.slot_bytes])
            for block in task.blocks:
                block.scatter(task.chunk, whole[start : start + array.chunk_bytes])
        with self._lock:
            self.seals.setdefault(shard.path, {}).update(seals)

    def _sound(self, shard: Shard, task: _Task, source: Source, slot: memoryview) -> int:
        """The checksum of a slot's chunk, if all of the slot is as it must be."""
        array: ArrayInfo = shard.array
        end = array.chunk_bytes
        where = f"chunk {task.chunk} of {array.name} (slot {task.slot} of {shard.path})"
        seal: int = struct.unpack_from("<I", slot, end)[0]
        if crc32c.crc32c(slot[:end]) != seal:
            raise DamagedCheckpoint(source.path, f"{where} has a wrong checksum")
        if source.expected(shard, task.slot) not in (None, seal):
            raise DamagedCheckpoint(source.path, f"{where} is sound, but not the one that was written")
        if any(slot[end + CRC_BYTES :]):
            raise DamagedCheckpoint(source.path, f"{where} is followed by something else than zeros")
        return seal

    def _buffer(self, size: int) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._own.buffer = torch.frombuffer(direct.memory(max(size, RUN_BYTES)), dtype=torch.uint8)
        return buffer[:size]
