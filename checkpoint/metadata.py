"""The Zarr metadata of a checkpoint: which arrays there are, and the small state in the root's attributes.

Owns the `zarr.json` files. Writing them is zarr-python's work, once for each set of arrays, but for putting them together in the
root's; only the root's attributes change from one checkpoint to the next. Reading goes without Zarr: the few fields that matter are
plain JSON.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import msgspec

from checkpoint import manifest, state
from checkpoint.described import Generation, Lengths, Parts, Step, array_of, converted, must_be_few, parsed
from checkpoint.elements import BITS_OF
from checkpoint.errors import DamagedCheckpoint, refuse_pipe, unreadable
from checkpoint.layout import ArrayInfo
from checkpoint.state import JSON

NAME = "zarr.json"
ATTRIBUTE = "resilient"
"""The root group's attribute that holds what is not an array."""

_NO_ATTRIBUTES = b'"attributes": {}'


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds."""

    step: int
    generation: int
    arrays: Mapping[str, ArrayInfo]
    state: Mapping[str, JSON]


def documents(arrays: Sequence[ArrayInfo]) -> dict[str, bytes]:
    """Every `zarr.json` by its path, consolidated in the root's, as zarr-python writes them."""
    import zarr
    from zarr.abc.codec import ArrayArrayCodec, ArrayBytesCodec, BytesBytesCodec
    from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
    from zarr.storage import MemoryStore

    files: dict[str, Any] = {}
    root = zarr.create_group(store=MemoryStore(files))
    for info in arrays:
        checked: list[ArrayArrayCodec | ArrayBytesCodec | BytesBytesCodec | dict[str, Any]] = [BytesCodec(), Crc32cCodec()]
        sharding = ShardingCodec(chunk_shape=info.chunk, codecs=checked, index_codecs=checked, index_location="start")
        root.create_array(
            info.name,
            shape=info.shape,
            dtype=info.element.stored,
            chunks=info.shard_shape,
            serializer=sharding if info.sharded else BytesCodec(),
            compressors=None if info.sharded else [Crc32cCodec()],
            filters=None,
            fill_value=0,
            chunk_key_encoding={"name": "default", "separator": "."},  # one directory and two files for each array
            attributes={} if info.element.stored == info.dtype else {BITS_OF: info.dtype},
        )
    found: dict[str, bytes] = {path: buffer.to_bytes() for path, buffer in files.items()}
    return {**found, NAME: consolidated(found, zarr.config.get("json_indent"))}


def consolidated(files: Mapping[str, bytes], indent: int | None) -> bytes:
    """The root's `zarr.json` with all others in it, to the last bit as `zarr.consolidate_metadata` writes it, which would have Zarr
    read its own groups: that fails under `python -O`, as an `assert` of Zarr's does a part of the work. Pure."""
    members = {path.removesuffix(f"/{NAME}"): json.loads(text) for path, text in files.items() if path != NAME}
    entries = {name: _holding(entry, {}) if entry["node_type"] == "group" else entry for name, entry in members.items()}
    order = sorted(entries, key=lambda name: (name.count("/"), unicodedata.normalize("NFKC", name).casefold()))
    return json.dumps(_holding(json.loads(files[NAME]), {name: entries[name] for name in order}), indent=indent).encode()


def _holding(group: Mapping[str, Any], members: Mapping[str, Any]) -> dict[str, Any]:
    """A group's document with those of its members; the fields in Zarr's order."""
    inline = {"kind": "inline", "must_understand": False, "metadata": members}
    return {
        "attributes": group["attributes"],
        "zarr_format": group["zarr_format"],
        "consolidated_metadata": inline,
        "node_type": "group",
    }


def with_attributes(root: bytes, step: int, generation: int, values: Mapping[str, JSON]) -> bytes:
    """The root's `zarr.json` of one checkpoint. Raises ValueError where `values` is not JSON."""
    attributes = {ATTRIBUTE: {"version": manifest.VERSION, "step": step, "generation": generation, "state": state.plain(values)}}
    text = json.dumps(attributes, allow_nan=False, ensure_ascii=False)
    # The rest is a hundred times as long, and the same for every step: it is not parsed again.
    return root.replace(_NO_ATTRIBUTES, b'"attributes": %s' % text.encode(), 1)


def read(path: Path, files: Mapping[str, manifest.FileEntry]) -> Contents:
    """What the checkpoint at `path` holds, from its root's `zarr.json`.

    Args:
        files: of its manifest: `zarr.json` must be as that says, and arrays must have as many files as it lists.

    Raises DamagedCheckpoint.
    """
    found = parse(path, text(path, files.get(NAME)))
    listed = sum(entry.chunks_crc32c is not None for entry in files.values())
    try:
        must_be_few(found.arrays.values(), listed)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"{NAME} does not match {manifest.NAME}: {error}") from error
    return found


def text(path: Path, expected: manifest.FileEntry | None) -> bytes:
    """The root's `zarr.json` in a directory, compared with its entry. Raises DamagedCheckpoint."""
    try:
        refuse_pipe(path / NAME)
        found = (path / NAME).read_bytes()
    except OSError as error:
        raise unreadable(path, NAME, error) from error
    if expected is None or (len(found), crc32c.crc32c(found)) != (expected.size_bytes, expected.crc32c):
        raise DamagedCheckpoint(path, f"{NAME} does not match the manifest")
    return found


def parse(path: Path, found: bytes) -> Contents:
    """What the root's `zarr.json` says; `path` is for messages. Raises DamagedCheckpoint."""
    try:
        document = converted(parsed(found), _Document)
        ours = document.attributes.resilient
        members = document.consolidated_metadata.metadata
        arrays = {name: _array(name, entry) for name, entry in members.items() if isinstance(entry, _Array)}
        must_be_few(arrays.values())
        return Contents(ours.step, ours.generation, arrays, ours.state)
    except ValueError as error:
        raise DamagedCheckpoint(path, f"{NAME} is not what a checkpoint has: {error}") from error


class _Ours(msgspec.Struct):
    step: Step
    generation: Generation
    state: dict[str, Any]


class _Attributes(msgspec.Struct):
    resilient: _Ours


class _Of(msgspec.Struct):
    bits_of: str | None = None


class _Configuration(msgspec.Struct):
    chunk_shape: Parts | None = None
    index_location: str | None = None


class _Codec(msgspec.Struct):
    name: str
    configuration: _Configuration | None = None


class _Grid(msgspec.Struct):
    configuration: _Configuration


class _Group(msgspec.Struct, tag_field="node_type", tag="group"):
    pass


class _Array(msgspec.Struct, tag_field="node_type", tag="array"):
    data_type: str
    shape: Lengths
    codecs: list[_Codec]
    chunk_grid: _Grid
    attributes: _Of


class _Members(msgspec.Struct):
    metadata: dict[str, _Array | _Group]


class _Document(msgspec.Struct):
    """What matters of the root's `zarr.json`."""

    attributes: _Attributes
    consolidated_metadata: _Members


def _array(name: str, entry: _Array) -> ArrayInfo:
    dtype = entry.attributes.bits_of or entry.data_type
    if not entry.shape:
        return array_of(name, dtype, (), (), ())
    first = entry.codecs[0] if len(entry.codecs) == 1 else None
    configuration = first.configuration if first is not None and first.name == "sharding_indexed" else None
    if configuration is None or configuration.index_location != "start":
        raise ValueError(f"array {name} is not sharded with its index at the start")
    chunk, shard = configuration.chunk_shape or [], entry.chunk_grid.configuration.chunk_shape or []
    if len(chunk) != len(shard):
        raise ValueError(f"array {name} has chunks of {len(chunk)} dimensions in shards of {len(shard)}")
    return array_of(name, dtype, entry.shape, chunk, [length // part for length, part in zip(shard, chunk, strict=True)])
