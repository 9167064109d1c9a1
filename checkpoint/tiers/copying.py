"""Copying a node shard: its chunks go from where they lie to the same offsets somewhere else, durably.

Owns the bytes of flushing and replicating. A copy that was cut off goes on where it was: what is done is in a journal beside it.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from checkpoint import direct, metadata, points, shard_manifest, slots
from checkpoint.commit import fsync_file
from checkpoint.errors import DamagedCheckpoint
from checkpoint.fence import fsync_directory, guard, newest_generation, raise_fence
from checkpoint.layout import ArrayInfo, ChunkRun, Shard
from checkpoint.naming import UNFINISHED, stale, step_path, temporary_path
from checkpoint.pruning import remove
from checkpoint.runs import runs
from checkpoint.shard_manifest import Chunks, ShardManifest
from checkpoint.source import Source
from checkpoint.threads import for_each
from checkpoint.tiers.pace import Pace

THREADS = 3
SHARES = ".shares"
"""Directory inside a checkpoint that is being flushed: each node's share with its checksums, and its journal."""


class Cancelled(Exception):
    """The copy is not wanted any more."""


class Copy:
    """What a copy needs beside the bytes.

    Args:
        pace: cap of the tier that is written to.
        cancelled: set to end the copy.
        moved: called with the bytes that were written since its last call, by several threads.
    """

    def __init__(self, pace: Pace, cancelled: threading.Event, moved: Callable[[int], None]) -> None:
        self.pace, self.cancelled, self.moved = pace, cancelled, moved
        self.check: Callable[[], None] = lambda: None
        """Raises DamagedCheckpoint where the source has changed while it was read."""


def shards_of(text: bytes, path: Path, chunks: Chunks | None = None) -> dict[str, Shard]:
    """The shard files that the root's metadata names.

    Args:
        chunks: of a node shard, which must be in these files.

    Raises DamagedCheckpoint.
    """
    arrays: Mapping[str, ArrayInfo] = metadata.parse(path, text).arrays
    found = {shard.path: shard for info in arrays.values() for shard in info.shards.values()}
    for name, sums in (chunks or {}).items():
        if name not in found or max(sums, default=0) > found[name].slots[-1]:
            raise DamagedCheckpoint(path, f"{shard_manifest.NAME} has chunks of {name} that none of its arrays has")
    return found


def root_metadata(documents: Mapping[str, bytes], path: Path) -> bytes:
    """The root's metadata among the files that are no arrays; `path` is for messages. Raises DamagedCheckpoint."""
    try:
        return documents[metadata.NAME]
    except KeyError:
        raise DamagedCheckpoint(path, f"{metadata.NAME} is missing") from None


def to_tier(
    source: Source,
    node_shard: ShardManifest,
    documents: Mapping[str, bytes],
    target: Path,
    copy: Copy,
    *,
    spare: Path | None = None,
) -> None:
    """Make `target` a directory that holds the node shard, on a tier of a node.

    Args:
        spare: a directory that held a node shard of the same arrays and is not needed; its files are overwritten.

    Raises OSError, DamagedCheckpoint where the source is not what it was, Cancelled.
    """
    temporary = target.with_name(f"{target.name}{UNFINISHED}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _write_shard(source, node_shard, documents, temporary, copy, spare)
    except BaseException:  # it may be a whole shard of memory, and nobody comes back to it
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if target.is_symlink() or target.is_file():  # nothing of ours
        target.unlink()
    elif target.exists():  # of a past that was left
        (target / shard_manifest.NAME).unlink(missing_ok=True)
        shutil.rmtree(target)
    temporary.rename(target)
    points.reached("copy_renamed")
    fsync_directory(target.parent)


def _write_shard(
    source: Source, node_shard: ShardManifest, documents: Mapping[str, bytes], temporary: Path, copy: Copy, spare: Path | None
) -> None:
    """Make the directory, durable; see `to_tier`."""
    shards = shards_of(root_metadata(documents, source.path), source.path, node_shard.chunks)
    if spare is not None and _fits(spare, {*documents, *shards}):
        spare.rename(temporary)
    else:
        temporary.mkdir(parents=True)
    points.reached("copy_begun")
    for name, text in documents.items():
        path = temporary / name
        if not path.exists() or path.read_bytes() != text:
            make_parents(path, temporary)
            path.write_bytes(text)
    _write_chunks(source, node_shard, shards, temporary, copy, list(shards), lambda name: None)
    (temporary / shard_manifest.NAME).write_bytes(shard_manifest.encode(node_shard))
    points.reached("copy_described")
    files = [temporary / name for name in (*documents, shard_manifest.NAME)]
    for file in files:
        fsync_file(file)
    for directory in sorted({parent for file in files for parent in file.parents if parent.is_relative_to(temporary)}):
        fsync_directory(directory)
    points.reached("copy_durable")


def _fits(spare: Path, names: set[str]) -> bool:
    """Whether a directory has exactly these files."""
    return {str(path.relative_to(spare)) for path in spare.rglob("*") if path.is_file()} == names


def flush(source: Source, node_shard: ShardManifest, documents: Mapping[str, bytes], root: Path, attempt: int, copy: Copy) -> None:
    """Write a node's share of a checkpoint that all nodes write together, on the durable tier; `joint_commit` commits it.

    Args:
        root: of committed checkpoints, which must be there: one that is unmounted or moved away meanwhile is not made anew.
        attempt: the generation on whose behalf it is written.

    Raises OSError, StaleGeneration, DamagedCheckpoint where the source is not what it was, Cancelled.
    """
    newest = newest_generation(root)
    if newest is None or newest < attempt:  # where the driver could not; all nodes would queue for the lock
        raise_fence(root, attempt, make=False)
    with guard(root, attempt):
        pass
    temporary = _take_over(root, node_shard.step, attempt)
    if node_shard.node == 0:  # what others still write there was called off
        for leftover in stale(root, attempt, node_shard.step):
            remove(leftover, lambda: copy.moved(0))
    points.reached("flush_begun")
    shares = temporary / SHARES
    shares.mkdir(exist_ok=True)
    name = f"node-{node_shard.node}.g{node_shard.generation}"
    journal = shares / f"{name}.done"
    done = set(journal.read_text(encoding="utf-8").split("\n")[:-1]) if journal.exists() else set()
    shards = shards_of(root_metadata(documents, source.path), source.path, node_shard.chunks)
    lock = threading.Lock()
    with journal.open("a", encoding="utf-8") as file:

        def keep(path: str) -> None:
            with lock:
                file.write(f"{path}\n")
                file.flush()
                os.fsync(file.fileno())
            points.reached("flush_journalled")

        _write_chunks(source, node_shard, shards, temporary, copy, [each for each in shards if each not in done], keep)
    points.reached("flush_written")
    new = shares / f"{name}.new"
    new.write_bytes(shard_manifest.encode(shard_manifest.without_documents(node_shard)))
    fsync_file(new)
    new.replace(shares / f"{name}.json")
    fsync_directory(shares)
    points.reached("flush_shared")


def make_parents(path: Path, base: Path) -> None:
    """Make the directories of a file inside of `base`, which must be there. Raises OSError."""
    for parent in reversed(path.relative_to(base).parents[:-1]):
        (base / parent).mkdir(exist_ok=True)


def _take_over(root: Path, step: int, attempt: int) -> Path:
    """The directory of this attempt: that of an earlier attempt at the same step where there is one."""
    temporary = temporary_path(root, step, attempt)
    if not temporary.exists():
        for other in stale(root, attempt):
            if other.name.startswith(f"{step_path(root, step).name}."):
                with suppress(OSError):  # another node was faster
                    other.rename(temporary)
                    break
    temporary.mkdir(exist_ok=True)
    return temporary


def _write_chunks(
    source: Source,
    node_shard: ShardManifest,
    shards: Mapping[str, Shard],
    target: Path,
    copy: Copy,
    names: list[str],
    done: Callable[[str], None],
) -> None:
    """Write the node shard's chunks of these shard files; the files are there at full size and with their index afterwards."""
    files = [_File(target, name, shards[name], node_shard.chunks.get(name, {}), copy, partial(done, name)) for name in names]
    half = len(files) // 2

    def runs() -> Iterator[tuple[_File, ChunkRun | None]]:
        for number, file in enumerate(files):
            if number == half:
                points.reached("half_of_copy_written")
            file.open()
            yield from ((file, run) for run in file.runs)

    def write(item: tuple[_File, ChunkRun | None]) -> None:
        file, run = item
        if run is None:
            _write_head(file.fd, file.shard)
        else:
            _write_run(file.fd, source, run, file.sums, copy)
        file.finished()

    try:
        for_each(runs(), lambda: write, THREADS, "checkpoint-copy")
    finally:
        for file in files:
            file.close()


class _File:
    """A shard file that is being written: when all its runs are, its source must not have changed, and it is made durable."""

    def __init__(
        self, target: Path, name: str, shard: Shard, sums: Mapping[int, int], copy: Copy, done: Callable[[], None]
    ) -> None:
        self.path, self.shard, self.sums = target / name, shard, sums
        self._target = target
        self.runs: list[ChunkRun | None] = [None] if shard.array.sharded else []  # the head
        self.runs += _runs(shard, sorted(sums))
        self.fd = -1
        self._copy, self._done = copy, done
        self._left = len(self.runs)
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make it, at full size. Raises OSError."""
        make_parents(self.path, self._target)
        self.fd = direct.open_to_write(self.path, create=True)
        if os.fstat(self.fd).st_size != self.shard.size_bytes:
            os.ftruncate(self.fd, self.shard.size_bytes)
            for first, count in runs(sorted(self.sums)):
                direct.preallocate(self.fd, self.shard.array.offset(first), count * self.shard.array.slot_bytes)
        if not self.runs:
            self._settle()

    def finished(self) -> None:
        """One more run is written. Raises OSError."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._settle()

    def _settle(self) -> None:
        self._copy.check()  # before what may take long, and is no reading any more
        os.fsync(self.fd)
        self.close()
        self._done()

    def close(self) -> None:
        """Close it, if it is open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _write_head(fd: int, shard: Shard) -> None:
    head = direct.memory(shard.array.first_slot)
    head[:] = shard.head
    direct.write(fd, head, 0)


def _runs(shard: Shard, held: list[int]) -> Iterator[ChunkRun]:
    at_once = max(1, slots.RUN_BYTES // shard.array.slot_bytes)
    for first, count in runs(held):
        for start in range(first, first + count, at_once):
            yield ChunkRun(shard, start, min(at_once, first + count - start))


def _write_run(fd: int, source: Source, run: ChunkRun, sums: Mapping[int, int], copy: Copy) -> None:
    if copy.cancelled.is_set():
        raise Cancelled
    shard, first, count = run
    view = source.view(shard, first, count)
    if not source.trusted:
        bad = slots.unsound(shard.array, view)
        if bad is not None:
            raise DamagedCheckpoint(source.path, f"slot {first + bad[0]} of {shard.path} {bad[1]}")
        if slots.seals(shard.array, view) != [sums[slot] for slot in range(first, first + count)]:
            raise DamagedCheckpoint(source.path, f"slots of {shard.path} from {first} on are not those that were written")
    copy.pace.wait(len(view), copy.cancelled)
    if copy.cancelled.is_set():
        raise Cancelled
    direct.write(fd, view, shard.array.offset(first))
    copy.moved(len(view))
