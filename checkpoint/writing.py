"""Writing a rank's share of the chunks into the shard files, durably.

Owns the path from a tensor's memory to the disk: each chunk with its checksum into its own slot, straight from the tensor
where that is possible, else through one staging buffer. Never touches a slot that is another rank's, and never reads a file.
"""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import crc32c
import torch

from checkpoint import crc, points
from checkpoint.block import Block
from checkpoint.layout import CRC_BYTES, PAGE_BYTES, Shape, Shard

FLUSH_BYTES = 64 << 20
_ZEROS = bytes(PAGE_BYTES)

Checksums = dict[str, dict[int, int]]
"""crc32c of each chunk that was written, by the shard file's path and slot."""


class Task(NamedTuple):
    """One chunk to write."""

    shard: Shard
    slot: int
    block: Block
    chunk: Shape


def write(directory: Path, tasks: Sequence[Task], *, pinned: bool = False) -> Checksums:
    """Write chunks into shard files that exist already with their full size; return when all is on the disk.

    Args:
        pinned: take page-locked memory for staging, for blocks on a GPU.

    Raises OSError.
    """
    ordered = sorted(tasks, key=lambda task: (task.shard.path, task.slot))
    staging = _staging(ordered, pinned)
    view = staging.numpy().data
    checksums: Checksums = {}
    with _Files(directory) as files:
        for number, (shard, slot, block, chunk) in enumerate(ordered):
            if number == len(ordered) // 2:
                points.reached("half_of_chunks_written")
            payload = block.memory(chunk)
            if payload is None:
                block.gather(chunk, staging)
                payload = view[: shard.array.chunk_bytes]
            checksum = crc32c.crc32c(payload)
            files.write(shard, slot, payload, checksum)
            checksums.setdefault(shard.path, {})[slot] = checksum
        points.reached("chunks_written")
        files.settle()
    points.reached("chunks_durable")
    return checksums


def _staging(tasks: Sequence[Task], pinned: bool) -> torch.Tensor:
    size = max((task.shard.array.chunk_bytes for task in tasks), default=0)
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class _Files:
    """The shard files that are being written, one at a time, each on its way to the disk as early as possible."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-fsync")
        self._flushes: deque[Future[None]] = deque()
        self._open: dict[str, int] = {}
        self._current: str | None = None
        self._dirty_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for fd in self._open.values():
            os.close(fd)

    def write(self, shard: Shard, slot: int, payload: memoryview, checksum: int) -> None:
        if shard.path != self._current:
            self._flush()
            self._current = shard.path
            self._open[shard.path] = os.open(self._directory / shard.path, os.O_WRONLY | os.O_CLOEXEC)
        gap = shard.array.slot_bytes - shard.array.chunk_bytes - CRC_BYTES
        parts = [payload, memoryview(crc.sealed(checksum)), memoryview(_ZEROS)[:gap]]
        _write_whole(self._open[shard.path], parts, shard.array.offset(slot))
        self._dirty_bytes += shard.array.slot_bytes
        if self._dirty_bytes >= FLUSH_BYTES:
            self._flush()

    def settle(self) -> None:
        """Wait until all that was written is durable. Raises OSError, also for what failed in the background."""
        self._flush()
        while self._flushes:
            self._flushes.popleft().result()

    def _flush(self) -> None:
        if self._current is not None and self._dirty_bytes:
            self._flushes.append(self._pool.submit(os.fsync, self._open[self._current]))
            self._dirty_bytes = 0


def _write_whole(fd: int, parts: list[memoryview], offset: int) -> None:
    while parts:
        written = os.pwritev(fd, parts, offset)
        offset += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts and written:
            parts[0] = parts[0][written:]


def merged(shares: Sequence[Mapping[str, Mapping[int, int]]]) -> Checksums:
    """All ranks' checksums in one."""
    everything: Checksums = {}
    for each in shares:
        for path, checksums in each.items():
            everything.setdefault(path, {}).update(checksums)
    return everything
