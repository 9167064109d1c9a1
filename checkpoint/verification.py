"""Verifying a checkpoint: every byte of every file is as it was written.

Owns reading whole files and comparing them with the manifest. Changes nothing; needs neither torch nor Zarr.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import crc32c

from checkpoint import direct, manifest, metadata
from checkpoint.errors import DamagedCheckpoint, unreadable
from checkpoint.layout import CRC_BYTES, ArrayInfo, Shard
from checkpoint.manifest import FileEntry, Manifest
from checkpoint.shard_manifest import Chunks

_BLOCK_BYTES = 8 << 20
_THREADS = 2


def verify(path: Path, *, part: int = 0, parts: int = 1, progress: Callable[[int], None] | None = None) -> None:
    """Compare this part's share of a checkpoint's files with its manifest; all parts together cover every byte.

    Args:
        path: a committed checkpoint.
        part: which share, from 0.
        parts: how many shares.
        progress: called with the number of bytes read since its last call, by several threads.

    Raises DamagedCheckpoint naming the file and what is wrong with it.
    """
    contents = manifest.read(path)
    found = metadata.read(path, contents.files)
    if (found.step, found.generation) != (contents.step, contents.generation):
        raise DamagedCheckpoint(
            path,
            f"{metadata.NAME} is of step {found.step}, generation {found.generation}, and {manifest.NAME} of "
            f"step {contents.step}, generation {contents.generation}",
        )
    shards = {shard.path: shard for info in found.arrays.values() for shard in info.shards.values()}
    if part == 0:
        _check_names(path, contents, shards)
    mine = share(contents, part, parts)
    _verify_files(path, contents, shards, mine, progress or _silent)


def verify_rest(path: Path, contents: Manifest, arrays: Mapping[str, ArrayInfo], read: Chunks) -> None:
    """Verify what a load has not read: names, metadata files, and shard files of which chunks are missing in `read`.

    Args:
        arrays: of the checkpoint.
        read: crc32c of the chunks that were read and found sound, by file and slot.

    Raises DamagedCheckpoint.
    """
    shards = {shard.path: shard for info in arrays.values() for shard in info.shards.values()}
    _check_names(path, contents, shards)
    whole = []
    for name, entry in contents.files.items():
        shard, seals = shards.get(name), read.get(name, {})
        if shard is None or len(seals) < len(shard.slots) or len(shard.slots) <= shard.slots[-1]:
            whole.append(name)
        elif shard.chunks_crc32c(seals) != entry.chunks_crc32c or entry.crc32c != shard.crc32c:
            raise DamagedCheckpoint(path, f"{name} has sound chunks, but they are not those that were written")
    _verify_files(path, contents, shards, whole, _silent)


def share(contents: Manifest, part: int, parts: int) -> list[str]:
    """The files that a part verifies, so that all parts have about as many bytes to read. Pure."""
    loads = [0] * parts
    mine = []
    for name, entry in sorted(contents.files.items(), key=lambda item: (-item[1].size_bytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += entry.size_bytes + 1
        if least == part:
            mine.append(name)
    return mine


def _check_names(path: Path, contents: Manifest, shards: Iterable[str]) -> None:
    unlisted = sorted(set(shards) - set(contents.files))
    if unlisted:
        raise DamagedCheckpoint(path, f"{manifest.NAME} does not list {unlisted[0]}")
    files = {*contents.files, manifest.NAME}
    directories = {str(parent) for name in files for parent in Path(name).parents}
    for name, mode in _entries(path, ""):
        if name not in (directories if S_ISDIR(mode) else files) or not (S_ISDIR(mode) or S_ISREG(mode)):
            raise DamagedCheckpoint(path, f"{name} does not belong to it")
        files.discard(name)
    if files:
        raise DamagedCheckpoint(path, f"{min(files)} is missing")


def _entries(path: Path, inside: str) -> Iterable[tuple[str, int]]:
    try:
        with os.scandir(path / inside) as entries:
            for entry in entries:
                name = f"{inside}{entry.name}"
                mode = entry.stat(follow_symlinks=False).st_mode
                yield name, mode
                if S_ISDIR(mode):
                    yield from _entries(path, f"{name}/")
    except OSError as error:
        raise unreadable(path, inside or "the directory", error) from error


def _silent(size_bytes: int) -> None:
    pass


def _verify_files(
    path: Path, contents: Manifest, shards: Mapping[str, Shard], names: Sequence[str], progress: Callable[[int], None]
) -> None:
    threads = min(_THREADS, len(names)) or 1
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-verify") as pool:
        work = [pool.submit(_check_files, path, contents, shards, names[first::threads], progress) for first in range(threads)]
    for each in work:
        each.result()


def _check_files(
    path: Path, contents: Manifest, shards: Mapping[str, Shard], names: Sequence[str], progress: Callable[[int], None]
) -> None:
    buffer = direct.memory(_BLOCK_BYTES)
    for name in names:
        shard = shards.get(name)
        if shard is not None and shard.size_bytes != contents.files[name].size_bytes:
            told = contents.files[name].size_bytes
            raise DamagedCheckpoint(path, f"{name} has {told} bytes, and its array needs {shard.size_bytes}")
        if shard is not None and shard.array.slot_bytes > len(buffer):
            buffer = direct.memory(shard.array.slot_bytes)
        try:
            _check_file(path, name, contents.files[name], shard, buffer, progress)
        except OSError as error:
            raise unreadable(path, name, error) from error


def _check_file(
    path: Path, name: str, entry: FileEntry, shard: Shard | None, buffer: memoryview, progress: Callable[[int], None]
) -> None:
    fd = direct.open_to_read(path / name)
    try:
        size = os.fstat(fd).st_size
        if size != entry.size_bytes:
            raise DamagedCheckpoint(path, f"{name} has {size} bytes instead of {entry.size_bytes}")
        if shard is not None and size != shard.size_bytes:
            raise DamagedCheckpoint(path, f"{name} has {size} bytes, and its array needs {shard.size_bytes}")
        whole, chunks = _checksums(fd, size, shard, buffer, progress)
    finally:
        os.close(fd)
    if whole != entry.crc32c:
        raise DamagedCheckpoint(path, f"{name} has checksum {whole:08x} instead of {entry.crc32c:08x}")
    if chunks != entry.chunks_crc32c:
        raise DamagedCheckpoint(path, f"{name} has sound chunks, but they are not those that were written")


def _checksums(
    fd: int, size: int, shard: Shard | None, buffer: memoryview, progress: Callable[[int], None]
) -> tuple[int, int | None]:
    """crc32c of the whole file; and of a shard file, over its chunks' checksums."""
    whole = 0
    if shard is None:
        for offset in range(0, size, len(buffer)):
            whole = crc32c.crc32c(_read(fd, offset, buffer[: min(len(buffer), size - offset)], progress), whole)
        return whole, None
    array = shard.array
    chunks = 0
    for offset in range(0, array.first_slot, len(buffer)):
        whole = crc32c.crc32c(_read(fd, offset, buffer[: min(len(buffer), array.first_slot - offset)], progress), whole)
    at_once = max(1, len(buffer) // array.slot_bytes)
    last = shard.slots[-1] + 1
    used = frozenset(shard.slots)
    for slot in range(0, last, at_once):
        count = min(at_once, last - slot)
        block = _read(fd, array.offset(slot), buffer[: count * array.slot_bytes], progress)
        whole = crc32c.crc32c(block, whole)
        ends = (number * array.slot_bytes + array.chunk_bytes for number in range(count) if slot + number in used)
        chunks = crc32c.crc32c(b"".join(block[end : end + CRC_BYTES] for end in ends), chunks)
    return whole, chunks


def _read(fd: int, offset: int, target: memoryview, progress: Callable[[int], None]) -> memoryview:
    if direct.read(fd, [target], offset) < len(target):
        raise OSError(None, "it ends early")
    progress(len(target))
    return target
