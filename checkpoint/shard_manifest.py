"""The manifest of a node shard: what one node holds of a checkpoint, as it lies on a tier of that node or of its buddy.

The directory of a node shard is that of the checkpoint, with all metadata, and shard files in which only the chunks of this node's
ranks are filled in; `part.json` lists those with their checksums, and is written last. The union of all node shards is the
checkpoint.

Owns the format of `part.json`. Needs neither torch nor Zarr.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint import sealed
from checkpoint.errors import DamagedCheckpoint
from checkpoint.manifest import FileEntry
from checkpoint.runs import runs

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
    """The text of `part.json`."""
    head = {"format": FORMAT, "version": VERSION, "step": manifest.step, "generation": manifest.generation}
    head |= {"node": manifest.node, "nodes": manifest.nodes, "size_bytes": manifest.size_bytes}
    files = {path: {"size": entry.size_bytes, "crc32c": f"{entry.crc32c:08x}"} for path, entry in sorted(manifest.files.items())}
    return sealed.seal({**head, "files": files, "chunks": {path: _pack(sums) for path, sums in sorted(manifest.chunks.items())}})


def read(path: Path) -> ShardManifest:
    """The manifest in a directory. Raises DamagedCheckpoint."""
    try:
        return decode(path, (path / NAME).read_bytes())
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"{NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(path, f"{NAME} cannot be read: {error.strerror}") from error


def decode(path: Path, text: bytes) -> ShardManifest:
    """A manifest from its text; `path` is for messages. Raises DamagedCheckpoint."""
    try:
        found = sealed.unseal(text)
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError(f"has format {found['format']!r} {found['version']!r}, expected {FORMAT!r} {VERSION}")
        files = {name: FileEntry(int(entry["size"]), int(entry["crc32c"], 16)) for name, entry in found["files"].items()}
        chunks = {name: _unpack(entry) for name, entry in found["chunks"].items()}
        step, generation, node, nodes, size = (int(found[key]) for key in ("step", "generation", "node", "nodes", "size_bytes"))
        return ShardManifest(step, generation, node, nodes, size, files, chunks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(path, f"{NAME} is not what a node shard has: {error}") from error


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


def _unpack(entry: Mapping[str, Any]) -> dict[int, int]:
    slots = [slot for first, count in entry["runs"] for slot in range(first, first + count)]
    text = entry["crc32c"]
    if len(text) != 8 * len(slots):
        raise ValueError(f"{len(slots)} chunks have {len(text) / 8:g} checksums")
    return {slot: int(text[8 * place : 8 * place + 8], 16) for place, slot in enumerate(slots)}
