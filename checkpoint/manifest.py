"""The manifest: every file of a checkpoint with its size and checksums.

Owns the format of `manifest.json`. Needs neither torch nor Zarr.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from checkpoint import sealed
from checkpoint.described import Count, Crc, Generation, Step, converted
from checkpoint.errors import DamagedCheckpoint, refuse_pipe, unreadable
from checkpoint.naming import step_of
from checkpoint.safe_name import checkpoint_name

NAME = "manifest.json"
FORMAT = "resilient-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class FileEntry:
    """One file.

    Attributes:
        size_bytes: of the file.
        crc32c: of the whole file.
        chunks_crc32c: of a shard file: crc32c over its chunks' checksums in the order of their slots. The file's own
            crc32c is the same for all contents, because a chunk that is followed by its checksum does not change it.
    """

    size_bytes: int
    crc32c: int
    chunks_crc32c: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of, by path relative to it."""

    step: int
    generation: int
    files: Mapping[str, FileEntry]

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(entry.size_bytes for entry in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """The file's text. Its last member is the crc32c of all the text before that member.

    Raises ValueError where a file has a name that `read` would refuse.
    """
    files: dict[str, dict[str, int | str]] = {}
    for path, entry in sorted(manifest.files.items()):
        files[checkpoint_name(path)] = {"size": entry.size_bytes, "crc32c": f"{entry.crc32c:08x}"}
        if entry.chunks_crc32c is not None:
            files[path]["chunks_crc32c"] = f"{entry.chunks_crc32c:08x}"
    head = {"format": FORMAT, "version": VERSION, "step": manifest.step, "generation": manifest.generation}
    return sealed.seal({**head, "files": files})


def read(path: Path, *, step: int | None = None) -> Manifest:
    """The manifest of the checkpoint at `path`. Args: step: that it must be of; None: the one that its name says.

    Raises DamagedCheckpoint.
    """
    try:
        refuse_pipe(path / NAME)
        text = (path / NAME).read_bytes()
    except OSError as error:
        raise unreadable(path, NAME, error) from error
    try:
        document = sealed.unseal(text)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"{NAME} {error}") from error
    try:
        manifest = _decode(path, document)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"{NAME} is not what a checkpoint has: {error}") from error
    if manifest.step != (step_of(path) if step is None else step):
        raise DamagedCheckpoint(path, f"{NAME} is that of step {manifest.step}")
    return manifest


class _Head(msgspec.Struct):
    format: str
    version: int


class _File(msgspec.Struct):
    size: Count
    crc32c: Crc
    chunks_crc32c: Crc | None = None


class _Document(msgspec.Struct):
    """`manifest.json` without its own checksum."""

    step: Step
    generation: Generation
    files: dict[str, _File]


def _decode(path: Path, found: Any) -> Manifest:
    head = converted(found, _Head)
    if head.format != FORMAT or head.version != VERSION:
        raise DamagedCheckpoint(path, f"{NAME} has format {head.format!r} {head.version!r}, expected {FORMAT!r} {VERSION}")
    document = converted(found, _Document)
    return Manifest(
        document.step, document.generation, {checkpoint_name(name): _entry(file) for name, file in document.files.items()}
    )


def _entry(file: _File) -> FileEntry:
    chunks = None if file.chunks_crc32c is None else int(file.chunks_crc32c, 16)
    return FileEntry(file.size, int(file.crc32c, 16), chunks)
