"""Writing a rank's share of the chunks into the shard files, durably.

Owns the path from a tensor's memory to the disk: neighbouring chunks, each with its checksum, are laid out in a buffer as they
lie in the file and written with one call. Never touches a slot that is another rank's, and never reads a file.
"""

import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import crc32c
import torch

from checkpoint import direct, points
from checkpoint.block import Block
from checkpoint.layout import Shape, Shard

RUN_BYTES = 8 << 20
THREADS = 3

Checksums = dict[str, dict[int, int]]
"""crc32c of each chunk that was written, by the shard file's path and slot."""


class Task(NamedTuple):
    """One chunk to write."""

    shard: Shard
    slot: int
    block: Block
    chunk: Shape


def write(directory: Path, tasks: Sequence[Task], *, pinned: bool = False, threads: int = THREADS) -> Checksums:
    """Write chunks into shard files that exist already with their full size; return when all is on the disk.

    Args:
        pinned: take page-locked memory for the buffers, for blocks on a GPU.
        threads: that fill buffers and write at the same time.

    Raises OSError.
    """
    runs = list(_runs(tasks))
    checksums: Checksums = {}
    with ExitStack() as stack:
        files = {}
        for shard in dict.fromkeys(run[0].shard.path for run in runs):
            files[shard] = direct.open_to_write(directory / shard)
            stack.callback(os.close, files[shard])
        writer = _Writer(files, max(map(_run_bytes, runs), default=0), pinned)
        if runs:
            with ThreadPoolExecutor(min(threads, len(runs)), thread_name_prefix="checkpoint-write") as pool:
                work = [pool.submit(writer.write, run) for run in runs[: len(runs) // 2]]
                try:
                    for each in work:
                        each.result()
                    points.reached("half_of_chunks_written")
                    work = [pool.submit(writer.write, run) for run in runs[len(runs) // 2 :]]
                    for each in work:
                        each.result()
                    points.reached("chunks_written")
                    list(pool.map(os.fsync, files.values()))
                finally:
                    pool.shutdown(wait=True, cancel_futures=True)
        for run, sums in writer.written:
            checksums.setdefault(run[0].shard.path, {}).update(zip((task.slot for task in run), sums, strict=True))
    points.reached("chunks_durable")
    return checksums


def _runs(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Chunks whose slots are neighbours, about RUN_BYTES at once."""
    run: list[Task] = []
    for task in sorted(tasks, key=lambda task: (task.shard.path, task.slot)):
        same = run and task.shard.path == run[-1].shard.path and task.slot == run[-1].slot + 1
        if run and (not same or _run_bytes(run) + task.shard.array.slot_bytes > RUN_BYTES):
            yield run
            run = []
        run.append(task)
    if run:
        yield run


def _run_bytes(run: Sequence[Task]) -> int:
    return len(run) * run[0].shard.array.slot_bytes


class _Writer:
    """Writes runs; each thread has one buffer, for fresh pages would cost more than the writing."""

    def __init__(self, files: Mapping[str, int], run_bytes: int, pinned: bool) -> None:
        self._files = files
        self._run_bytes = run_bytes
        self._pinned = pinned
        self._own = threading.local()
        self.written: list[tuple[Sequence[Task], list[int]]] = []

    def write(self, run: Sequence[Task]) -> None:
        """Lay out a run and write it. Raises OSError."""
        array = run[0].shard.array
        buffer = self._buffer()
        view = buffer.numpy().data
        sums = []
        for number, task in enumerate(run):
            start = number * array.slot_bytes
            end = start + array.chunk_bytes
            task.block.gather(task.chunk, buffer[start:end])
            sums.append(crc32c.crc32c(view[start:end]))
            struct.pack_into("<I", view, end, sums[-1])
            buffer[end + 4 : start + array.slot_bytes].zero_()
        direct.write(self._files[run[0].shard.path], view[: _run_bytes(run)], array.offset(run[0].slot))
        self.written.append((run, sums))

    def _buffer(self) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None:
            if self._pinned:
                raw = torch.empty(self._run_bytes + direct.PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
                buffer = raw[-raw.data_ptr() % direct.PAGE_BYTES :]
            else:
                buffer = torch.frombuffer(direct.memory(self._run_bytes), dtype=torch.uint8)
            self._own.buffer = buffer
        return buffer


def merged(shares: Sequence[Mapping[str, Mapping[int, int]]]) -> Checksums:
    """All ranks' checksums in one."""
    everything: Checksums = {}
    for each in shares:
        for path, checksums in each.items():
            everything.setdefault(path, {}).update(checksums)
    return everything
