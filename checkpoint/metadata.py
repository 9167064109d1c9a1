"""The Zarr metadata of a checkpoint: which arrays there are, and the small state in the root's attributes.

Owns the `zarr.json` files. Writing them is zarr-python's work, once for each set of arrays; only the root's attributes change
from one checkpoint to the next. Reading goes without Zarr: the few fields that matter are plain JSON.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c

from checkpoint import manifest, state
from checkpoint.elements import BITS_OF, element
from checkpoint.errors import DamagedCheckpoint
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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata")  # clients that do not know it pass over it
        zarr.consolidate_metadata(root.store)
    return {path: buffer.to_bytes() for path, buffer in files.items()}


def with_attributes(root: bytes, step: int, generation: int, values: Mapping[str, JSON]) -> bytes:
    """The root's `zarr.json` of one checkpoint. Raises ValueError where `values` is not JSON."""
    attributes = {ATTRIBUTE: {"version": manifest.VERSION, "step": step, "generation": generation, "state": state.plain(values)}}
    text = json.dumps(attributes, allow_nan=False, ensure_ascii=False)
    # The rest is a hundred times as long, and the same for every step: it is not parsed again.
    return root.replace(_NO_ATTRIBUTES, b'"attributes": %s' % text.encode(), 1)


def read(path: Path, expected: manifest.FileEntry | None) -> Contents:
    """What the checkpoint at `path` holds, from its root's `zarr.json`, which must be as its manifest says.

    Raises DamagedCheckpoint.
    """
    return parse(path, text(path, expected))


def text(path: Path, expected: manifest.FileEntry | None) -> bytes:
    """The root's `zarr.json` in a directory, compared with its entry. Raises DamagedCheckpoint."""
    try:
        found = (path / NAME).read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(path, f"{NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(path, f"{NAME} cannot be read: {error.strerror}") from error
    if expected is None or (len(found), crc32c.crc32c(found)) != (expected.size_bytes, expected.crc32c):
        raise DamagedCheckpoint(path, f"{NAME} does not match the manifest")
    return found


def parse(path: Path, found: bytes) -> Contents:
    """What the root's `zarr.json` says; `path` is for messages. Raises DamagedCheckpoint."""
    try:
        document = json.loads(found)
        ours = document["attributes"][ATTRIBUTE]
        members = document["consolidated_metadata"]["metadata"]
        arrays = {name: _array(name, entry) for name, entry in members.items() if entry["node_type"] == "array"}
        return Contents(ours["step"], ours["generation"], arrays, ours["state"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(path, f"{NAME} is not what a checkpoint has: {error!r}") from error


def _array(name: str, entry: Mapping[str, Any]) -> ArrayInfo:
    dtype = entry["attributes"].get(BITS_OF, entry["data_type"])
    element(dtype)
    shape = tuple(entry["shape"])
    if not shape:
        return ArrayInfo(name, dtype, (), (), ())
    (sharding,) = entry["codecs"]
    if sharding["name"] != "sharding_indexed" or sharding["configuration"]["index_location"] != "start":
        raise ValueError(f"array {name} is not sharded with its index at the start")
    chunk = tuple(sharding["configuration"]["chunk_shape"])
    shard = tuple(entry["chunk_grid"]["configuration"]["chunk_shape"])
    per_shard = tuple(length // part for length, part in zip(shard, chunk, strict=True))
    return ArrayInfo(name, dtype, shape, chunk, per_shard)
