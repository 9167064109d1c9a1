"""The manifest of a node shard: what one node holds of a checkpoint, as it lies on a tier of that node or of its buddy.

The directory of a node shard is that of the checkpoint, with all metadata, and shard files in which only the chunks of this node's
ranks are filled in; `part.json` lists those with their checksums, and is written last. The union of all node shards is the
checkpoint.

Owns the format of `part.json`. Needs neither torch nor Zarr.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import crc32c
import msgspec

from checkpoint import sealed
from checkpoint.described import Count, Crc, Crcs, Generation, Nodes, Runs, Step, converted, slots_of
from checkpoint.errors import DamagedCheckpoint, unreadable
from checkpoint.manifest import FileEntry
from checkpoint.runs import runs
from checkpoint.safe_name import metadata_name, shard_name

NAME = "part.json"
FORMAT = "resilient-part"
VERSION = 1

Chunks = Mapping[str, Mapping[int, int]]


@dataclass(frozen=True)
class ShardManifest:
    """What one node shard consists of.

    Attributes:
        step: that it is of.
        generation: of the ranks that took the snapshot.
        node: whose ranks those are, from 0.
        nodes: into so many node shards the checkpoint is divided.
        size_bytes: of its chunks, with their slots' padding.
        files: the metadata files, which every node shard has.
        chunks: crc32c of each chunk, by file and slot.
    """

    step: int
    generation: int
    node: int
    nodes: int
    size_bytes: int
    files: Mapping[str, FileEntry]
    chunks: Chunks


def encode(manifest: ShardManifest) -> bytes:
    """The text of `part.json`. Raises ValueError where a file has a name that `decode` would refuse."""
    head = {"format": FORMAT, "version": VERSION, "step": manifest.step, "generation": manifest.generation}
    head |= {"node": manifest.node, "nodes": manifest.nodes, "size_bytes": manifest.size_bytes}
    files = {
        metadata_name(path): {"size": entry.size_bytes, "crc32c": f"{entry.crc32c:08x}"}
        for path, entry in sorted(manifest.files.items())
    }
    chunks = {shard_name(path): _pack(sums) for path, sums in sorted(manifest.chunks.items())}
    return sealed.seal({**head, "files": files, "chunks": chunks})


def read(path: Path) -> ShardManifest:
    """The manifest in a directory. Raises DamagedCheckpoint."""
    try:
        return decode(path, (path / NAME).read_bytes())
    except OSError as error:
        raise unreadable(path, NAME, error) from error


def find(path: Path) -> ShardManifest | None:
    """The manifest in a directory; None where it has none, or a wrong one.

    Raises OSError where it cannot be read, which says nothing of it: it may be sound.
    """
    try:
        return decode(path, (path / NAME).read_bytes())
    except (FileNotFoundError, DamagedCheckpoint):
        return None


def decode(path: Path, text: bytes) -> ShardManifest:
    """A manifest from its text; `path` is for messages. Raises DamagedCheckpoint."""
    try:
        found = converted(sealed.unseal(text), _Document)
        if found.format != FORMAT or found.version != VERSION:
            raise ValueError(f"has format {found.format!r} {found.version!r}, expected {FORMAT!r} {VERSION}")
        if found.node >= found.nodes:
            raise ValueError(f"it is of node {found.node} of {found.nodes}")
        files = {metadata_name(name): FileEntry(entry.size, int(entry.crc32c, 16)) for name, entry in found.files.items()}
        chunks = {shard_name(name): _unpack(entry) for name, entry in found.chunks.items()}
        return ShardManifest(found.step, found.generation, found.node, found.nodes, found.size_bytes, files, chunks)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"{NAME} is not what a node shard has: {error}") from error


class _File(msgspec.Struct):
    size: Count
    crc32c: Crc


class _Chunks(msgspec.Struct):
    runs: Runs
    crc32c: Crcs


class _Document(msgspec.Struct):
    """`part.json` without its own checksum."""

    format: str
    version: int
    step: Step
    generation: Generation
    node: Count
    nodes: Nodes
    size_bytes: Count
    files: dict[str, _File]
    chunks: dict[str, _Chunks]


def documents(path: Path, manifest: ShardManifest) -> dict[str, bytes]:
    """The metadata files beside a manifest, which says what must be in them. Raises DamagedCheckpoint."""
    found = {}
    for name, entry in manifest.files.items():
        try:
            fd = os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                text = file.read(entry.size_bytes) if os.fstat(fd).st_size == entry.size_bytes else b""
        except OSError as error:
            raise unreadable(path, name, error) from error
        if (len(text), crc32c.crc32c(text)) != (entry.size_bytes, entry.crc32c):
            raise DamagedCheckpoint(path, f"{name} does not match {NAME}")
        found[name] = text
    return found


def merged(manifests: Iterable[ShardManifest]) -> Chunks:
    """The checksums of all node shards' chunks."""
    everything: dict[str, dict[int, int]] = {}
    for manifest in manifests:
        for path, sums in manifest.chunks.items():
            everything.setdefault(path, {}).update(sums)
    return everything


def without_documents(manifest: ShardManifest) -> ShardManifest:
    """The same chunks, for where the metadata is elsewhere."""
    return replace(manifest, files={})


def _pack(sums: Mapping[int, int]) -> dict[str, Any]:
    """Slots as runs [first, count], checksums of all in a row: short, also where there are thousands."""
    slots = sorted(sums)
    return {"runs": runs(slots), "crc32c": "".join(f"{sums[slot]:08x}" for slot in slots)}


def _unpack(entry: _Chunks) -> dict[int, int]:
    text = entry.crc32c
    slots = slots_of(entry.runs, len(text) // 8)
    return {slot: int(text[8 * place : 8 * place + 8], 16) for place, slot in enumerate(slots)}
