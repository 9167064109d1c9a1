"""docs/checkpoint-format.md is exact: a program that knows nothing else writes what this package reads, and the same bytes."""

import json
import math
import struct
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crc32c import crc32c

from checkpoint import LocalShard, load, local_shard_of, newest_good, save, verify

Array = np.ndarray[Any, np.dtype[Any]]


def up(size: int) -> int:
    return -(-size // 4096) * 4096


def shard_file(values: Array, chunk: tuple[int, ...]) -> tuple[bytes, int]:
    """One shard file for all of an array, and the crc32c over its chunks' checksums."""
    grid = tuple(-(-length // part) for length, part in zip(values.shape, chunk, strict=True))
    size = values.itemsize * math.prod(chunk)
    first, slot = up(16 * math.prod(grid) + 4), up(size + 4)
    index, slots, checksums = b"", b"", b""
    for number, place in enumerate(product(*map(range, grid))):
        box = tuple(slice(at * part, (at + 1) * part) for at, part in zip(place, chunk, strict=True))
        padded = np.zeros(chunk, values.dtype)
        inside = values[box]
        padded[tuple(slice(0, length) for length in inside.shape)] = inside
        checksum = struct.pack("<I", crc32c(padded.tobytes()))
        index += struct.pack("<QQ", first + number * slot, size + 4)
        slots += (padded.tobytes() + checksum).ljust(slot, b"\0")
        checksums += checksum
    return (index + struct.pack("<I", crc32c(index))).ljust(first, b"\0") + slots, crc32c(checksums)


def metadata(values: Array, chunk: tuple[int, ...]) -> dict[str, Any]:
    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    shard = [-(-length // part) * part for length, part in zip(values.shape, chunk, strict=True)]
    sharding = {"chunk_shape": chunk, "codecs": checked, "index_codecs": checked, "index_location": "start"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": values.shape,
        "data_type": str(values.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
    }


def write_by_the_book(path: Path, values: Array, chunk: tuple[int, ...]) -> None:
    array, group = metadata(values, chunk), {"zarr_format": 3, "node_type": "group", "attributes": {}}
    ours = {"version": 1, "step": 12, "generation": 0, "state": {"by": "the book"}}
    consolidated = {"kind": "inline", "must_understand": False, "metadata": {"model": group, "model/weight": array}}
    root = {**group, "attributes": {"resilient": ours}, "consolidated_metadata": consolidated}
    shard, chunks = shard_file(values, chunk)
    files = {
        "zarr.json": json.dumps(root).encode(),
        "model/zarr.json": json.dumps(group).encode(),
        "model/weight/zarr.json": json.dumps(array).encode(),
        "model/weight/c.0.0": shard,
    }
    listed: dict[str, dict[str, Any]] = {name: {"size": len(text), "crc32c": f"{crc32c(text):08x}"} for name, text in files.items()}
    listed["model/weight/c.0.0"]["chunks_crc32c"] = f"{chunks:08x}"
    manifest = {"format": "resilient-checkpoint", "version": 1, "step": 12, "generation": 0, "files": listed}
    body = json.dumps(manifest)[:-1].encode()
    files["manifest.json"] = body + b',\n "crc32c": "%08x"\n}\n' % crc32c(body)
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(text)


def test_what_is_written_by_the_book_is_read(root: Path) -> None:
    values = np.arange(35, dtype="<f4").reshape(7, 5)
    write_by_the_book(root / "step-00000012", values, (3, 2))
    path = newest_good(root)
    assert path is not None
    found = torch.zeros(7, 5)
    assert load(path, [local_shard_of("model/weight", found)]) == {"by": "the book"}
    assert np.array_equal(found.numpy(), values)


@pytest.mark.parametrize("chunk", [(7, 5), (3, 5), (3, 2)])
def test_what_is_written_is_as_in_the_book(root: Path, chunk: tuple[int, int]) -> None:
    values = np.arange(35, dtype="<f4").reshape(7, 5)
    local_shard = LocalShard("model/weight", (7, 5), (0, 0), torch.from_numpy(values), chunk)
    saved = save(root, 12, [local_shard], {}, generation=0)
    verify(saved.path)
    shard, chunks = shard_file(values, chunk)
    assert (saved.path / "model/weight/c.0.0").read_bytes() == shard
    manifest = json.loads((saved.path / "manifest.json").read_bytes())
    assert manifest["files"]["model/weight/c.0.0"] == {
        "size": len(shard),
        "crc32c": f"{crc32c(shard):08x}",
        "chunks_crc32c": f"{chunks:08x}",
    }
