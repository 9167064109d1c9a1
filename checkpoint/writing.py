"""Writing a rank's share of the chunks into the shard files, durably.

Owns the path from a tensor's memory to the disk: neighbouring chunks, each with its checksum, are laid out in a buffer as they
lie in the file and written with one call. Never touches a slot that is another rank's, and never reads a file.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint import direct, points, slots
from checkpoint.block import Block
from checkpoint.layout import Strip
from checkpoint.threads import for_each

THREADS = 4
_FSYNC_THREADS = 8

Checksums = dict[str, dict[int, int]]
"""crc32c of each chunk that was written, by the shard file's path and slot."""


class Task(NamedTuple):
    """Chunks of one block to write."""

    strip: Strip
    block: Block


class _Run(NamedTuple):
    """Slots that are neighbours in a file, to be written at once."""

    strip: Strip
    tasks: Sequence[Task]


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
        for shard in dict.fromkeys(run.strip.shard.path for run in runs):
            files[shard] = direct.open_to_write(directory / shard)
            stack.callback(os.close, files[shard])
        writer = _Writer(files, max((_bytes(run.strip) for run in runs), default=0), pinned, max(1, len(runs) // 2))
        for_each(runs, writer.worker, min(threads, len(runs)), "checkpoint-write")
        points.reached("chunks_written")
        for_each(files.values(), lambda: os.fsync, min(_FSYNC_THREADS, len(files)), "checkpoint-fsync")
        for strip, sums in writer.written:
            checksums.setdefault(strip.shard.path, {}).update(zip(range(strip.slot, strip.slot + strip.length), sums, strict=True))
    points.reached("chunks_durable")
    return checksums


def _runs(tasks: Sequence[Task]) -> Iterator[_Run]:
    """Chunks whose slots are neighbours, about slots.RUN_BYTES at once."""
    begun: list[Task] = []
    for task in sorted(tasks, key=lambda task: (task.strip.shard.path, task.strip.slot)):
        most = max(1, slots.RUN_BYTES // task.strip.shard.array.slot_bytes)
        first, end = task.strip.slot, task.strip.slot + task.strip.length
        while first < end:
            last = begun[-1].strip if begun else None
            if last is not None:
                room = most - (last.slot + last.length - begun[0].strip.slot)
                if last.shard is not task.strip.shard or last.slot + last.length != first or room <= 0:
                    yield _run(begun)
                    begun, room = [], most
            else:
                room = most
            part = task.strip.part(first, first + room)
            begun.append(Task(part, task.block))
            first += part.length
    if begun:
        yield _run(begun)


def _run(tasks: Sequence[Task]) -> _Run:
    shard, slot, _ = tasks[0].strip
    return _Run(Strip(shard, slot, sum(task.strip.length for task in tasks)), tasks)


def _bytes(strip: Strip) -> int:
    return strip.length * strip.shard.array.slot_bytes


class _Writer:
    """Writes runs; each thread has one buffer, for fresh pages would cost more than the writing."""

    def __init__(self, files: Mapping[str, int], run_bytes: int, pinned: bool, half: int) -> None:
        self._files = files
        self._run_bytes = run_bytes
        self._pinned = pinned
        self._half = half
        self.written: list[tuple[Strip, list[int]]] = []

    def worker(self) -> Callable[[_Run], None]:
        """What one thread does with a run. It raises OSError."""
        buffer = self._buffer()

        def write(run: _Run) -> None:
            self.written.append((run.strip, self._write(run, buffer)))
            if len(self.written) == self._half:
                points.reached("half_of_chunks_written")

        return write

    def _write(self, run: _Run, buffer: torch.Tensor) -> list[int]:
        """Lay out a run and write it; its chunks' checksums."""
        array = run.strip.shard.array
        view = buffer.numpy().data
        sums: list[int] = []
        for strip, block in run.tasks:
            start = (strip.slot - run.strip.slot) * array.slot_bytes
            end = start + _bytes(strip)
            block.gather(strip, buffer[start:end])
            sums += slots.seal(array, view[start:end])
        direct.write(self._files[run.strip.shard.path], view[: _bytes(run.strip)], array.offset(run.strip.slot))
        return sums

    def _buffer(self) -> torch.Tensor:
        if self._pinned:
            raw = torch.empty(self._run_bytes + direct.PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
            return raw[-raw.data_ptr() % direct.PAGE_BYTES :]
        return torch.frombuffer(direct.memory(self._run_bytes), dtype=torch.uint8)


def merged(shares: Sequence[Mapping[str, Mapping[int, int]]]) -> Checksums:
    """All ranks' checksums in one."""
    everything: Checksums = {}
    for each in shares:
        for path, checksums in each.items():
            everything.setdefault(path, {}).update(checksums)
    return everything
