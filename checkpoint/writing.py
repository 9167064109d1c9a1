"""Writing a rank's share of the chunks into the shard files, durably.

Owns the path from a tensor's memory to the disk: neighbouring chunks, each with its checksum, are laid out in a buffer as they
lie in the file and written with one call. Never touches a slot that is another rank's, and never reads a file.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint import direct, points, slots
from checkpoint.block import Block
from checkpoint.layout import ChunkRun
from checkpoint.threads import for_each

THREADS = 4
_FSYNC_THREADS = 8
_OPEN_FILES = 64

Checksums = dict[str, dict[int, int]]
"""crc32c of each chunk that was written, by the shard file's path and slot."""


class Task(NamedTuple):
    """Chunks of one block to write."""

    chunk_run: ChunkRun
    block: Block


class _Run(NamedTuple):
    """Slots that are neighbours in a file, to be written at once."""

    chunk_run: ChunkRun
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
    with closing(_Files(directory, runs)) as files:
        writer = _Writer(files, max((_bytes(run.chunk_run) for run in runs), default=0), pinned, max(1, len(runs) // 2))
        for_each(files.opened(), writer.worker, min(threads, len(runs)), "checkpoint-write")
        points.reached("chunks_written")
        files.settle()
    for chunk_run, sums in writer.written:
        checksums.setdefault(chunk_run.shard.path, {}).update(
            zip(range(chunk_run.slot, chunk_run.slot + chunk_run.length), sums, strict=True)
        )
    points.reached("chunks_durable")
    return checksums


def _runs(tasks: Sequence[Task]) -> Iterator[_Run]:
    """Chunks whose slots are neighbours, about slots.RUN_BYTES at once."""
    begun: list[Task] = []
    for task in sorted(tasks, key=lambda task: (task.chunk_run.shard.path, task.chunk_run.slot)):
        most = max(1, slots.RUN_BYTES // task.chunk_run.shard.array.slot_bytes)
        first, end = task.chunk_run.slot, task.chunk_run.slot + task.chunk_run.length
        while first < end:
            last = begun[-1].chunk_run if begun else None
            if last is not None:
                room = most - (last.slot + last.length - begun[0].chunk_run.slot)
                if last.shard is not task.chunk_run.shard or last.slot + last.length != first or room <= 0:
                    yield _run(begun)
                    begun, room = [], most
            else:
                room = most
            part = task.chunk_run.part(first, first + room)
            begun.append(Task(part, task.block))
            first += part.length
    if begun:
        yield _run(begun)


def _run(tasks: Sequence[Task]) -> _Run:
    shard, slot, _ = tasks[0].chunk_run
    return _Run(ChunkRun(shard, slot, sum(task.chunk_run.length for task in tasks)), tasks)


def _bytes(chunk_run: ChunkRun) -> int:
    return chunk_run.length * chunk_run.shard.array.slot_bytes


class _Files:
    """Shard files while they are written: each is open from its first run on, few are at once, however many there are.

    Those of which all runs are written are made durable together: a file system has less to do for many at once than for each.

    Args:
        runs: all that will be written, those of a file one behind the other.
    """

    def __init__(self, directory: Path, runs: Sequence[_Run]) -> None:
        self._directory, self._runs = directory, runs
        self._left = Counter(run.chunk_run.shard.path for run in runs)  # runs that are not written, by file
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def opened(self) -> Iterator[_Run]:
        """The runs, whose file is open when they come. Raises OSError."""
        path = None
        for run in self._runs:
            if run.chunk_run.shard.path != path:
                path = run.chunk_run.shard.path
                if len(self._fds) >= _OPEN_FILES:
                    self.settle()
                self._fds[path] = direct.open_to_write(self._directory / path)
            yield run

    def fd(self, run: _Run) -> int:
        """Of the file of a run that came and was not written yet."""
        return self._fds[run.chunk_run.shard.path]

    def written(self, run: _Run) -> None:
        """One more run is."""
        with self._lock:
            self._left[run.chunk_run.shard.path] -= 1

    def settle(self) -> None:
        """Make the files durable of which all runs are written, and close them. Raises OSError."""
        with self._lock:
            whole = [path for path in self._fds if not self._left[path]]
        for_each([self._fds[path] for path in whole], lambda: os.fsync, min(_FSYNC_THREADS, len(whole)), "checkpoint-fsync")
        for path in whole:
            os.close(self._fds.pop(path))

    def close(self) -> None:
        """Close what is open."""
        for fd in self._fds.values():
            os.close(fd)


class _Writer:
    """Writes runs; each thread has one buffer, for fresh pages would cost more than the writing."""

    def __init__(self, files: _Files, run_bytes: int, pinned: bool, half: int) -> None:
        self._files = files
        self._run_bytes = run_bytes
        self._pinned = pinned
        self._half = half
        self.written: list[tuple[ChunkRun, list[int]]] = []

    def worker(self) -> Callable[[_Run], None]:
        """What one thread does with a run. It raises OSError."""
        buffer = self._buffer()

        def write(run: _Run) -> None:
            self.written.append((run.chunk_run, self._write(run, buffer)))
            self._files.written(run)
            if len(self.written) == self._half:
                points.reached("half_of_chunks_written")

        return write

    def _write(self, run: _Run, buffer: torch.Tensor) -> list[int]:
        """Lay out a run and write it; its chunks' checksums."""
        array = run.chunk_run.shard.array
        view = buffer.numpy().data
        sums: list[int] = []
        for chunk_run, block in run.tasks:
            start = (chunk_run.slot - run.chunk_run.slot) * array.slot_bytes
            end = start + _bytes(chunk_run)
            block.gather(chunk_run, buffer[start:end])
            sums += slots.seal(array, view[start:end])
        direct.write(self._files.fd(run), view[: _bytes(run.chunk_run)], array.offset(run.chunk_run.slot))
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
