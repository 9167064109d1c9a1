"""Copying a part: its chunks go from where they lie to the same offsets somewhere else, durably.

Owns the bytes of flushing and replicating. A copy that was cut off goes on where it was: what is done is in a journal beside it.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import crc32c

from checkpoint import commit, direct, manifest, metadata, points
from checkpoint import part as parts
from checkpoint.commit import fsync_file
from checkpoint.errors import CheckpointError, DamagedCheckpoint
from checkpoint.fence import fsync_directory, guard, raise_fence
from checkpoint.layout import ArrayInfo, Shard
from checkpoint.loading import RUN_BYTES
from checkpoint.manifest import Manifest
from checkpoint.naming import stale, step_path, temporary_path
from checkpoint.part import Part
from checkpoint.pruning import prune, remove
from checkpoint.source import Source
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


def shards_of(text: bytes, path: Path) -> dict[str, Shard]:
    """The shard files that the root's metadata names. Raises DamagedCheckpoint."""
    arrays: Mapping[str, ArrayInfo] = metadata.parse(path, text).arrays
    return {shard.path: shard for info in arrays.values() for shard in info.shards.values()}


def to_tier(
    source: Source, part: Part, documents: Mapping[str, bytes], target: Path, copy: Copy, *, spare: Path | None = None
) -> None:
    """Make `target` a directory that holds the part, on a tier of a node.

    Args:
        spare: a directory that held a part of the same arrays and is not needed; its files are overwritten.

    Raises OSError, DamagedCheckpoint where the source is not what it was, Cancelled.
    """
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shards = shards_of(documents[metadata.NAME], source.path)
    if spare is not None and _fits(spare, {*documents, *shards}):
        spare.rename(temporary)
    else:
        temporary.mkdir(parents=True)
    points.reached("copy_begun")
    for name, text in documents.items():
        path = temporary / name
        if not path.exists() or path.read_bytes() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    _write_chunks(source, part, shards, temporary, copy, list(shards), lambda name: None)
    copy.check()
    (temporary / parts.NAME).write_bytes(parts.encode(part))
    points.reached("copy_described")
    files = [temporary / name for name in (*documents, parts.NAME)]
    for file in files:
        fsync_file(file)
    for directory in sorted({parent for file in files for parent in file.parents if parent.is_relative_to(temporary)}):
        fsync_directory(directory)
    points.reached("copy_durable")
    if target.exists():  # of a past that was left
        (target / parts.NAME).unlink(missing_ok=True)
        shutil.rmtree(target)
    temporary.rename(target)
    points.reached("copy_renamed")
    fsync_directory(target.parent)


def _fits(spare: Path, names: set[str]) -> bool:
    """Whether a directory has exactly these files."""
    return {str(path.relative_to(spare)) for path in spare.rglob("*") if path.is_file()} == names


def flush(source: Source, part: Part, documents: Mapping[str, bytes], root: Path, attempt: int, copy: Copy) -> None:
    """Write a node's share of a checkpoint that all nodes write together, on the durable tier; `finish` commits it.

    Args:
        root: of committed checkpoints.
        attempt: the generation on whose behalf it is written.

    Raises OSError, StaleGeneration, DamagedCheckpoint where the source is not what it was, Cancelled.
    """
    raise_fence(root, attempt)
    with guard(root, attempt):
        pass
    temporary = _take_over(root, part.step, attempt)
    points.reached("flush_begun")
    shares = temporary / SHARES
    shares.mkdir(exist_ok=True)
    name = f"node-{part.node}.g{part.generation}"
    journal = shares / f"{name}.done"
    done = set(journal.read_text().split("\n")[:-1]) if journal.exists() else set()
    shards = shards_of(documents[metadata.NAME], source.path)
    lock = threading.Lock()
    with journal.open("a") as file:

        def keep(path: str) -> None:
            with lock:
                file.write(f"{path}\n")
                file.flush()
                os.fsync(file.fileno())
            points.reached("flush_journalled")

        _write_chunks(source, part, shards, temporary, copy, [each for each in shards if each not in done], keep)
    points.reached("flush_written")
    copy.check()
    new = shares / f"{name}.new"
    new.write_bytes(parts.encode(parts.without_documents(part)))
    fsync_file(new)
    new.replace(shares / f"{name}.json")
    fsync_directory(shares)
    points.reached("flush_shared")


def finish(
    part: Part,
    documents: Mapping[str, bytes],
    root: Path,
    attempt: int,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Manifest:
    """Commit what all nodes have flushed; one of them does.

    Args:
        part: of the node that commits.

    Raises OSError, StaleGeneration, CheckpointError where a share is missing.
    """
    target = step_path(root, part.step)
    temporary = temporary_path(root, part.step, attempt)
    if not temporary.exists() and target.exists():
        return manifest.read(target)  # it was committed by one that died before it could say so
    with guard(root, attempt):
        pass
    shares = [_share(temporary, node, part) for node in range(part.nodes)]
    points.reached("finish_begun")
    for name, text in documents.items():
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(text)
    shards = shards_of(documents[metadata.NAME], temporary)
    try:
        files = commit.entries(documents, shards.values(), parts.merged(shares))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    for name, shard in shards.items():
        size = (temporary / name).stat().st_size
        if size != shard.size_bytes:
            raise CheckpointError(f"{temporary / name} has {size} bytes instead of {shard.size_bytes}")
    shutil.rmtree(temporary / SHARES)
    points.reached("finish_shares_gone")
    contents = Manifest(part.step, part.generation, files)
    commit.commit(root, attempt, contents)
    for leftover in stale(root, attempt):
        remove(leftover)
    if keep_last is not None:
        with suppress(OSError):
            prune(root, keep_last, keep_every, upto=part.step, generation=attempt)
    return contents


def _take_over(root: Path, step: int, attempt: int) -> Path:
    """The directory of this attempt: that of an earlier attempt at the same step where there is one."""
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        fsync_directory(root.parent)
    temporary = temporary_path(root, step, attempt)
    if not temporary.exists():
        for other in stale(root, attempt):
            if other.name.startswith(f"{step_path(root, step).name}."):
                with suppress(OSError):  # another node was faster
                    other.rename(temporary)
                    break
    temporary.mkdir(exist_ok=True)
    return temporary


def _share(temporary: Path, node: int, part: Part) -> Part:
    path = temporary / SHARES / f"node-{node}.g{part.generation}.json"
    try:
        return parts.decode(temporary, path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: that node has not flushed its share") from None


def _write_chunks(
    source: Source,
    part: Part,
    shards: Mapping[str, Shard],
    target: Path,
    copy: Copy,
    names: list[str],
    done: Callable[[str], None],
) -> None:
    """Write the part's chunks of these shard files; the files are there at full size and with their index afterwards."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="checkpoint-copy") as pool:
        tail = None
        for number, name in enumerate(names):
            if number == len(names) // 2:
                points.reached("half_of_copy_written")
            shard, sums = shards[name], part.chunks.get(name, {})
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = direct.open_to_write(path, create=True)
            try:
                if os.fstat(fd).st_size != shard.size_bytes:
                    os.ftruncate(fd, shard.size_bytes)
                work = [pool.submit(_write_head, fd, shard)] if shard.array.sharded else []
                work += [pool.submit(_write_run, fd, source, shard, run, sums, copy) for run in _runs(shard, sorted(sums))]
                try:
                    for each in work:
                        each.result()
                finally:
                    for each in work:
                        each.cancel()
            except BaseException:
                os.close(fd)
                raise
            if tail is not None:
                tail.result()
            tail = pool.submit(_settle, fd, name, done)  # while the next file is being written
        if tail is not None:
            tail.result()


def _settle(fd: int, name: str, done: Callable[[str], None]) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    done(name)


def _write_head(fd: int, shard: Shard) -> None:
    head = direct.memory(shard.array.first_slot)
    head[:] = shard.head
    direct.write(fd, head, 0)


def _runs(shard: Shard, slots: list[int]) -> Iterator[tuple[int, int]]:
    at_once = max(1, RUN_BYTES // shard.array.slot_bytes)
    for first, count in parts.runs(slots):
        for start in range(0, count, at_once):
            yield first + start, min(at_once, count - start)


def _write_run(fd: int, source: Source, shard: Shard, run: tuple[int, int], sums: Mapping[int, int], copy: Copy) -> None:
    if copy.cancelled.is_set():
        raise Cancelled
    first, count = run
    array = shard.array
    view = source.view(shard, first, count)
    if not source.trusted:
        for number in range(count):
            start = number * array.slot_bytes
            if crc32c.crc32c(view[start : start + array.chunk_bytes]) != sums[first + number]:
                raise DamagedCheckpoint(source.path, f"slot {first + number} of {shard.path} has a wrong checksum")
    copy.pace.wait(len(view), copy.cancelled)
    if copy.cancelled.is_set():
        raise Cancelled
    direct.write(fd, view, array.offset(first))
    copy.moved(len(view))
