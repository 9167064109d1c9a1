"""Making a checkpoint appear: the temporary directory, and the one rename that publishes it.

Owns the order of the effects on disk, so that after a crash at any point a reader finds the old or the new, and never a half:
contents durable, then manifest, then directories, then the name, then the directory that holds the name.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import crc32c

from checkpoint import direct, manifest, points
from checkpoint.errors import DamagedCheckpoint
from checkpoint.fence import fsync_directory, guard
from checkpoint.layout import Shard
from checkpoint.manifest import FileEntry, Manifest
from checkpoint.naming import aside, stale, step_path, temporary_path
from checkpoint.verification import verify

_FSYNC_THREADS = 8


def good(root: Path, step: int, progress: Callable[[], None] = lambda: None) -> Manifest | None:
    """The manifest of a step that is there and sound, None otherwise. Args: progress: called for each block that is read."""
    path = step_path(root, step)
    try:
        verify(path, progress=lambda size_bytes: progress())
        return manifest.read(path)
    except DamagedCheckpoint:
        return None


def open_temporary(root: Path, step: int, generation: int, shards: Iterable[Shard], documents: Mapping[str, bytes]) -> Path:
    """A directory to write into: metadata, and shard files of full size that have their index and no chunks.

    Removes what older generations have left unfinished. Raises StaleGeneration, OSError.
    """
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        fsync_directory(root.parent)
    with guard(root, generation):
        pass
    temporary = temporary_path(root, step, generation)
    for leftover in stale(root, generation):
        shutil.rmtree(leftover, ignore_errors=True)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    points.reached("temporary_created")
    for path, text in documents.items():
        (temporary / path).parent.mkdir(parents=True, exist_ok=True)
        (temporary / path).write_bytes(text)
    points.reached("metadata_written")
    for shard in shards:
        with (temporary / shard.path).open("xb") as file:
            file.write(shard.index)
            file.truncate(shard.size_bytes)  # which writes the index out first
            direct.preallocate(file.fileno(), 0, shard.size_bytes)
    points.reached("indices_written")
    return temporary


def entries(
    documents: Mapping[str, bytes], shards: Iterable[Shard], checksums: Mapping[str, Mapping[int, int]]
) -> dict[str, FileEntry]:
    """What the manifest says of each file. Raises ValueError where a chunk was not written."""
    found = {path: FileEntry(len(text), crc32c.crc32c(text)) for path, text in documents.items()}
    for shard in shards:
        written = checksums.get(shard.path, {})
        missing = [slot for slot in shard.slots if slot not in written]
        if missing:
            raise ValueError(f"{len(missing)} chunks of {shard.path} were not written, the first one in slot {missing[0]}")
        found[shard.path] = FileEntry(shard.size_bytes, shard.crc32c, shard.chunks_crc32c(written))
    return found


def commit(
    root: Path,
    generation: int,
    contents: Manifest,
    *,
    of_others: bool = True,
    described: Callable[[], None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
) -> bool:
    """Publish the temporary directory of a step; False where the same step turned out to be there already, and sound.

    A damaged checkpoint of that step is set aside under another name.

    Args:
        of_others: one that is sound stays, whichever generation took the snapshot. Else one of another generation is set aside,
            too: it is of a past that the run does not go on from.
        described: called once the manifest is durable, and before the directories are.
        progress: called for each file that is made durable, by several threads.

    Raises StaleGeneration, OSError: then it can be called again.
    """
    target, temporary = step_path(root, contents.step), temporary_path(root, contents.step, generation)
    (temporary / manifest.NAME).write_bytes(manifest.encode(contents))
    points.reached("manifest_written")
    files = [temporary / path for path in (*contents.files, manifest.NAME)]
    directories = sorted({parent for file in files for parent in file.parents if parent.is_relative_to(temporary)})

    def durable(fsync: Callable[[Path], None], path: Path) -> None:
        fsync(path)
        progress()

    with ThreadPoolExecutor(_FSYNC_THREADS, thread_name_prefix="checkpoint-fsync") as pool:
        list(pool.map(partial(durable, fsync_file), files))
        points.reached("manifest_durable")
        described()
        list(pool.map(partial(durable, fsync_directory), directories))
    points.reached("directories_durable")
    there = good(root, contents.step, progress)
    if there is not None and (of_others or there.generation == contents.generation):
        shutil.rmtree(temporary)
        return False
    with guard(root, generation):
        points.reached("fence_checked")
        if os.path.lexists(target):  # a link that leads nowhere is in the way, too
            target.rename(aside(target, "damaged" if there is None else "passed-over"))
            points.reached("old_set_aside")
        temporary.rename(target)
        points.reached("renamed")
        fsync_directory(root)
    points.reached("published")
    return True


def fsync_file(path: Path) -> None:
    """Make a file's contents durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
