"""Loading: each rank reads what it needs, from whatever layout wrote it.

Owns the path from the shard files into tensors: only chunks that a piece touches are read, neighbours together, straight
into the tensor where a chunk lies there in one stretch; each is compared with its checksum. No communication takes place.
"""

import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import crc32c
import torch

from checkpoint import manifest, metadata
from checkpoint.block import Block
from checkpoint.errors import CheckpointMismatch, DamagedCheckpoint
from checkpoint.layout import CRC_BYTES, Shape, Shard
from checkpoint.manifest import FileEntry
from checkpoint.metadata import Contents
from checkpoint.piece import Piece
from checkpoint.state import JSON

RUN_BYTES = 16 << 20
_RUN_SLOTS = 256  # two buffers each; a system call takes 1024


class _Task(NamedTuple):
    """One chunk to read."""

    slot: int
    block: Block
    chunk: Shape


@dataclass(frozen=True)
class _Run:
    """Chunks whose slots are neighbours, to be read at once."""

    fd: int
    shard: Shard
    tasks: Sequence[_Task]


def read_state(path: Path) -> Mapping[str, JSON]:
    """The small state that was saved with a checkpoint. Raises DamagedCheckpoint."""
    return _contents(path)[0].state


def load(path: Path, pieces: Sequence[Piece], *, threads: int = 2) -> Mapping[str, JSON]:
    """Fill the pieces' tensors in place from a checkpoint, whatever layout wrote it; return the state saved with it.

    Args:
        path: a committed checkpoint.
        pieces: what this rank wants; blocks may lie anywhere in their arrays, and overlap.
        threads: that read at once.

    Raises DamagedCheckpoint where what is read is not what was written (the tensors' contents are undefined then), and
    CheckpointMismatch, before any tensor changes, where an array is missing or has another shape or type.
    """
    source = Source(path)
    source.fill(pieces, threads=threads)
    return source.contents.state


class Source:
    """A checkpoint from which piece after piece is read, and its metadata once. Threads may share it.

    Raises DamagedCheckpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contents, self._files = _contents(path)
        self._reader = _Reader(path)

    def fill(self, pieces: Sequence[Piece], *, threads: int = 2) -> None:
        """Fill the pieces' tensors in place. Raises as `load`."""
        for piece in pieces:
            _check(self.path, self.contents, piece)
        with ExitStack() as stack:
            wanted = [piece for piece in pieces if piece.data.numel()]
            runs = list(_runs(self.path, self.contents, self._files, wanted, stack))
            if len(runs) == 1 or threads < 2:
                for run in runs:
                    self._reader.read(run)
            elif runs:
                with ThreadPoolExecutor(min(threads, len(runs)), thread_name_prefix="checkpoint-load") as pool:
                    work = [pool.submit(self._reader.read, run) for run in runs]
                    try:
                        for each in work:
                            each.result()
                    finally:
                        pool.shutdown(wait=True, cancel_futures=True)


def _contents(path: Path) -> tuple[Contents, Mapping[str, FileEntry]]:
    files = manifest.read(path).files
    return metadata.read(path, files.get(metadata.NAME)), files


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


def _runs(
    path: Path, contents: Contents, files: Mapping[str, FileEntry], pieces: Sequence[Piece], stack: ExitStack
) -> Iterator[_Run]:
    """What to read, by file and offset. The files stay open as long as `stack`."""
    tasks: dict[Shard, list[_Task]] = {}
    for piece in pieces:
        info = contents.arrays[piece.array]
        block = Block(piece, info)
        for chunk in info.touched(piece.offset, piece.extent):
            shard, slot = info.locate(chunk)
            tasks.setdefault(shard, []).append(_Task(slot, block, chunk))
    for shard, wanted in tasks.items():
        fd = _open(path, shard, files.get(shard.path), stack)
        at_once = min(_RUN_SLOTS, max(1, RUN_BYTES // shard.array.slot_bytes))
        run: list[_Task] = []
        for task in sorted(wanted, key=lambda task: task.slot):
            if run and (task.slot != run[-1].slot + 1 or len(run) == at_once):
                yield _Run(fd, shard, run)
                run = []
            run.append(task)
        yield _Run(fd, shard, run)


def _open(path: Path, shard: Shard, entry: FileEntry | None, stack: ExitStack) -> int:
    """The shard file, whose size and index are as they must be."""
    try:
        fd = os.open(path / shard.path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        size = os.fstat(fd).st_size
        index = os.pread(fd, shard.array.index_bytes, 0)
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"{shard.path} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(path, f"{shard.path} cannot be read: {error.strerror}") from error
    if entry is None or not size == entry.size_bytes == shard.size_bytes:
        raise DamagedCheckpoint(path, f"{shard.path} has {size} bytes instead of {shard.size_bytes}")
    if index != shard.index:
        raise DamagedCheckpoint(path, f"{shard.path} has a wrong index")
    return fd


class _Reader:
    """Reads runs; each thread has one buffer, for fresh pages would cost more than the reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = threading.local()

    def read(self, run: _Run) -> None:
        """Fill the tensors from one run. Raises DamagedCheckpoint."""
        array = run.shard.array
        buffer = self._buffer(len(run.tasks) * array.slot_bytes)
        view = buffer.numpy().data
        slots = [view[place : place + array.slot_bytes] for place in range(0, len(view), array.slot_bytes)]
        direct = [task.block.memory(task.chunk) for task in run.tasks]
        targets: list[memoryview] = []
        for slot, memory in zip(slots, direct, strict=False):
            targets += [slot] if memory is None else [memory, slot[array.chunk_bytes :]]
        self._fill(run, targets)
        for number, (task, slot, memory) in enumerate(zip(run.tasks, slots, direct, strict=False)):
            seal = struct.unpack("<I", slot[array.chunk_bytes : array.chunk_bytes + CRC_BYTES])[0]
            if crc32c.crc32c(slot[: array.chunk_bytes] if memory is None else memory) != seal:
                raise DamagedCheckpoint(
                    self._path, f"chunk {task.chunk} of {array.name} (slot {task.slot} of {run.shard.path}) has a wrong checksum"
                )
            if memory is None:
                task.block.scatter(task.chunk, buffer[number * array.slot_bytes :])

    def _fill(self, run: _Run, targets: list[memoryview]) -> None:
        offset = run.shard.array.offset(run.tasks[0].slot)
        while targets:
            try:
                count = os.preadv(run.fd, targets, offset)
            except OSError as error:
                raise DamagedCheckpoint(self._path, f"{run.shard.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise DamagedCheckpoint(self._path, f"{run.shard.path} ends at byte {offset}")
            offset += count
            while targets and count >= len(targets[0]):
                count -= len(targets.pop(0))
            if targets and count:
                targets[0] = targets[0][count:]

    def _buffer(self, size: int) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._own.buffer = torch.empty(max(size, RUN_BYTES), dtype=torch.uint8)
        return buffer[:size]
