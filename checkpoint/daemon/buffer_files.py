"""The files of a buffer: making them, sealing them, reading them.

Everything here runs in threads and knows no bookkeeping: see `checkpoint.daemon.buffers`.
"""

import json
import mmap
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path

import crc32c

from checkpoint import points, safe_dir, shard_manifest, slots
from checkpoint.errors import DamagedCheckpoint
from checkpoint.layout import Shard
from checkpoint.manifest import FileEntry
from checkpoint.metadata import NAME as METADATA
from checkpoint.metadata import with_attributes
from checkpoint.protocol import SnapshotKey
from checkpoint.shard_manifest import ShardManifest
from checkpoint.source import Source
from checkpoint.tiers.blueprint import Blueprint
from checkpoint.tiers.lease import LAYOUT, STATE


class BufferFiles:
    """The directory of a buffer as it was made once, with its mappings. May be used by several threads.

    Invariant: the files behind it are never made anew; a buffer that is gets another BufferFiles.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()

    def view(self, shard: Shard) -> memoryview:
        """The bytes of a shard file. Raises OSError, ValueError."""
        with self._lock:
            area = self._maps.get(shard.path)
            if area is None:
                fd = os.open(self.directory / shard.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    area = self._maps[shard.path] = mmap.mmap(fd, shard.size_bytes)
                finally:
                    os.close(fd)
        return memoryview(area)


def make(directory: Path, blueprint: Blueprint, *, trusted: Path | None = None) -> None:
    """Make the directory of a buffer from nothing.

    Args:
        trusted: see `checkpoint.safe_dir`.

    Raises OSError where there is no room, UnsafeDirectory where others could change it.
    """
    safe_dir.make_private(directory.parent, trusted=trusted)
    shutil.rmtree(directory, ignore_errors=True)
    place = safe_dir.open_private(directory, trusted=trusted)
    try:
        points.reached("buffer_made")
        for name, text in blueprint.documents.items():
            with os.fdopen(safe_dir.create(place, name), "w", encoding="utf-8") as file:
                file.write(text)
        for name, shard in blueprint.shards.items():
            _make_shard(safe_dir.create(place, name), shard, blueprint.stretches(name) if name in blueprint.slots else ())
        with os.fdopen(safe_dir.create(place, LAYOUT), "w") as file:
            file.write(blueprint.digest)
    finally:
        os.close(place)
    points.reached("buffer_ready")


def _make_shard(fd: int, shard: Shard, stretches: Sequence[Sequence[int]]) -> None:
    """Fill in a new shard file, and close it."""
    try:
        os.ftruncate(fd, shard.size_bytes)
        os.pwrite(fd, shard.head, 0)
        for first, count in stretches:
            # All pages are there from now on: a worker that runs out of room while it copies would die of SIGBUS.
            os.posix_fallocate(fd, shard.array.offset(first), count * shard.array.slot_bytes)
    finally:
        os.close(fd)


def seal(
    files: BufferFiles, blueprint: Blueprint, key: SnapshotKey, shard: int, shards: int, pool: Executor
) -> tuple[ShardManifest, Path]:
    """Write the checksum of every chunk that the workers have copied, and the manifest beside `part.json`'s place.

    Returns the manifest and the file that becomes `part.json` by a rename. Raises OSError, ValueError.
    """
    directory = files.directory
    with suppress(FileNotFoundError):
        (directory / shard_manifest.NAME).unlink()
    points.reached("seal_begun")
    views = {path: files.view(blueprint.shards[path]) for path in blueprint.slots}
    paths = sorted(blueprint.slots, key=lambda path: -len(blueprint.slots[path]))
    sums = list(pool.map(lambda path: _checksums(blueprint.shards[path], blueprint.stretches(path), views[path]), paths))
    points.reached("seal_summed")
    state = json.loads((directory / STATE).read_bytes())
    root = with_attributes(blueprint.documents[METADATA].encode(), key.step, key.generation, state)
    (directory / METADATA).write_bytes(root)
    documents = {**{name: text.encode() for name, text in blueprint.documents.items()}, METADATA: root}
    entries = {name: FileEntry(len(text), crc32c.crc32c(text)) for name, text in documents.items()}
    chunks = dict(zip(paths, sums, strict=True))
    manifest = ShardManifest(key.step, key.generation, shard, shards, blueprint.size_bytes, entries, chunks)
    new = directory / f"{shard_manifest.NAME}.new"
    new.write_bytes(shard_manifest.encode(manifest))
    points.reached("seal_described")
    return manifest, new


def _checksums(shard: Shard, stretches: Sequence[Sequence[int]], view: memoryview) -> Mapping[int, int]:
    """Write the checksum of each chunk behind it."""
    sums: dict[int, int] = {}
    for first, count in stretches:
        start = shard.array.offset(first)
        sealed = slots.seal(shard.array, view[start : start + count * shard.array.slot_bytes])
        sums.update(zip(range(first, first + count), sealed, strict=True))
    return sums


class BufferSource(Source):
    """A sealed buffer that a job reads. Its owner does not lease the buffer as long as it is pinned; `check` finds out afterwards
    whether it was overwritten."""

    trusted = True

    def __init__(self, files: BufferFiles, manifest: ShardManifest) -> None:
        self.path = files.directory
        self.manifest = manifest
        self._files = files
        self._identity = self._identify()

    def _identify(self) -> tuple[int, int] | None:
        try:
            found = (self.path / shard_manifest.NAME).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def holds(self, shard: Shard, slot: int) -> bool:
        return slot in self.manifest.chunks.get(shard.path, ())

    def view(self, shard: Shard, slot: int, count: int) -> memoryview:
        start = shard.array.offset(slot)
        return self._files.view(shard)[start : start + count * shard.array.slot_bytes]

    def check(self) -> None:
        # Workers remove part.json before they write: as long as it is there, what was read before is what was sealed.
        if self._identity is None or self._identify() != self._identity:
            raise DamagedCheckpoint(self.path, "it was overwritten while it was read")

    def read(self, shard: Shard, slot: int, target: memoryview) -> None:
        target[:] = self.view(shard, slot, len(target) // shard.array.slot_bytes)
