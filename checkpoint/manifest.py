"""The manifest: every file of a checkpoint with its size and checksums.

Owns the format of `manifest.json`. Needs neither torch nor Zarr.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import sealed
from checkpoint.errors import DamagedCheckpoint
from checkpoint.naming import step_of

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
    """The file's text. Its last member is the crc32c of all the text before that member."""
    files: dict[str, dict[str, int | str]] = {}
    for path, entry in sorted(manifest.files.items()):
        files[path] = {"size": entry.size_bytes, "crc32c": f"{entry.crc32c:08x}"}
        if entry.chunks_crc32c is not None:
            files[path]["chunks_crc32c"] = f"{entry.chunks_crc32c:08x}"
    head = {"format": FORMAT, "version": VERSION, "step": manifest.step, "generation": manifest.generation}
    return sealed.seal({**head, "files": files})


def read(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`. Raises DamagedCheckpoint."""
    try:
        text = (path / NAME).read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"{NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(path, f"{NAME} cannot be read: {error.strerror}") from error
    try:
        document = sealed.unseal(text)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"{NAME} {error}") from error
    try:
        manifest = _decode(path, document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(path, f"{NAME} is not what a checkpoint has: {error!r}") from error
    if manifest.step != step_of(path):
        raise DamagedCheckpoint(path, f"{NAME} is that of step {manifest.step}")
    return manifest


def _decode(path: Path, found: Mapping[str, Any]) -> Manifest:
    if found["format"] != FORMAT or found["version"] != VERSION:
        raise DamagedCheckpoint(path, f"{NAME} has format {found['format']!r} {found['version']!r}, expected {FORMAT!r} {VERSION}")
    files = {
        name: FileEntry(
            int(entry["size"]),
            int(entry["crc32c"], 16),
            int(entry["chunks_crc32c"], 16) if "chunks_crc32c" in entry else None,
        )
        for name, entry in found["files"].items()
    }
    return Manifest(int(found["step"]), int(found["generation"]), files)
