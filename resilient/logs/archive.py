"""Archives of old folders: `tar` in `zstd`, to which folders are added without packing anew what is in it.

An archive is a sequence of zstd frames, one for each folder, with the folder's members of a tar stream. Before each frame stands a
skippable frame (RFC 8878, 3.1.2) that says which folder follows and how long it is, so that one is found without unpacking the
others. `tar --zstd -xf` reads it as any other archive.
"""

import io
import json
import os
import struct
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from checkpoint.typed import built

LEVEL = 3  # 300 MB/s a core, a tenth of a log's size
COPY_BYTES = 1 << 20

_MAGIC = 0x184D2A5C  # one of sixteen that readers skip
_HEADER = struct.Struct("<II")
_LENGTH_DIGITS = 16
_ENTRY_BYTES = 64 << 20
_WINDOW_BYTES = 8 << 20  # of zstd: what LEVEL takes is a quarter of that


class _Entry(msgspec.Struct):
    folder: str
    files: dict[str, int]


_entry = msgspec.json.Decoder(built(_Entry))


class DamagedArchive(Exception):
    """A file is no archive of folders, or was cut short."""


@dataclass(frozen=True)
class Packed:
    """A folder in an archive.

    Attributes:
        name: of the folder.
        files: their sizes in bytes, by path below the folder.
        offset, length: of its frame, in bytes.
    """

    name: str
    files: dict[str, int]
    offset: int
    length: int


def contents(path: Path) -> list[Packed]:
    """What is in an archive, in the order in which it was added; nothing where there is none.

    Raises:
        DamagedArchive: it is none.
        OSError: it cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        return list(_contents(file, path))


def _contents(file: BinaryIO, path: Path) -> Iterator[Packed]:
    end = file.seek(0, os.SEEK_END)
    offset = file.seek(0)
    while offset < end:
        header = file.read(_HEADER.size)
        try:
            magic, size = _HEADER.unpack(header)
            if magic != _MAGIC:
                raise ValueError(f"magic number {magic:#x}")
            if size > min(_ENTRY_BYTES, end - offset):
                raise ValueError(f"an entry of {size} bytes")
            text = file.read(size)
            digits = text[:_LENGTH_DIGITS]
            if not digits.isdigit():
                raise ValueError(f"a length of {digits!r}")
            entry = _entry.decode(text[_LENGTH_DIGITS:])
            packed = Packed(entry.folder, entry.files, offset + _HEADER.size + size, int(digits))
        except (struct.error, ValueError, RecursionError) as error:
            raise DamagedArchive(f"{path} is no archive of folders at byte {offset}: {error}") from error
        offset = file.seek(packed.offset + packed.length)
        if offset > end:
            raise DamagedArchive(f"{path} ends before folder {packed.name} does")
        yield packed


def add(path: Path, folders: list[Path]) -> None:
    """Add folders to an archive, which is made if need be. Until this returns, it is as it was.

    Raises:
        OSError: the archive cannot be written, or a folder not be read.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            if path.exists():
                with path.open("rb") as old:
                    while data := old.read(COPY_BYTES):
                        file.write(data)
            for folder in folders:
                _append(file, folder)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:  # it may be all the room that there was, and nobody comes back to it soon
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _append(file: BinaryIO, folder: Path) -> None:
    paths = sorted(each for each in folder.rglob("*") if each.is_file() and not each.is_symlink())
    sizes = {str(each.relative_to(folder)): each.stat().st_size for each in paths}
    entry = json.dumps({"folder": folder.name, "files": sizes}).encode()
    began = file.tell()
    file.write(_HEADER.pack(_MAGIC, _LENGTH_DIGITS + len(entry)) + b"0" * _LENGTH_DIGITS + entry)
    frame = file.tell()
    with zstandard.ZstdCompressor(level=LEVEL).stream_writer(file, closefd=False) as stream:
        for each, size in zip(paths, sizes.values(), strict=True):
            with each.open("rb") as source:
                # The header and the bytes of a member, without the end of an archive: others follow.
                info = tarfile.TarInfo(f"{folder.name}/{each.relative_to(folder)}")
                info.size, info.mtime, info.mode = size, int(each.stat().st_mtime), 0o644
                stream.write(info.tobuf(tarfile.GNU_FORMAT))
                left = size
                while left and (data := source.read(min(left, COPY_BYTES))):
                    stream.write(data)
                    left -= len(data)
                stream.write(b"\0" * (left + -size % tarfile.BLOCKSIZE))  # `left`: it has become shorter
    end = file.tell()
    file.seek(began + _HEADER.size)
    file.write(f"{end - frame:0{_LENGTH_DIGITS}}".encode())
    file.seek(end)


def read(path: Path, packed: Packed) -> Iterator[tuple[str, bytes]]:
    """The files of a folder: path below it, and content. Raises DamagedArchive, OSError."""
    with path.open("rb") as file:
        file.seek(packed.offset)
        frame = io.BytesIO(file.read(packed.length))
        try:
            with (
                zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(frame) as stream,
                tarfile.open(fileobj=stream, mode="r|") as tar,
            ):
                for member in tar:
                    content = tar.extractfile(member)
                    name = member.name.removeprefix(f"{packed.name}/")
                    if content is not None:
                        if member.size != packed.files.get(name):
                            raise DamagedArchive(f"folder {packed.name} in {path} has another {name} than it says")
                        yield name, content.read()
        except (zstandard.ZstdError, tarfile.TarError, ValueError, EOFError) as error:
            raise DamagedArchive(f"folder {packed.name} in {path} cannot be read: {error}") from error


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
