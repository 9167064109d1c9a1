"""The root's `zarr.json`, which has all others in it."""

import json
import subprocess
import sys
import warnings
from typing import Any

import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from checkpoint import metadata
from checkpoint.described import array_of

ARRAYS = [
    array_of("model/weight", "float32", (8, 64), (4, 64), (2, 1)),
    array_of("ab/0.bias", "bfloat16", (5,), (5,), (1,)),
    array_of("ranks/model/é", "int64", (3,), (3,), (1,)),
    array_of("scalar", "float32", (), (), ()),
]


def test_metadata_are_consolidated_to_the_last_bit_as_zarr_does_it() -> None:
    ours = metadata.documents(ARRAYS)
    files: dict[str, Any] = {path: default_buffer_prototype().buffer.from_bytes(text) for path, text in ours.items()}
    root = {name: value for name, value in json.loads(ours["zarr.json"]).items() if name != "consolidated_metadata"}
    files["zarr.json"] = default_buffer_prototype().buffer.from_bytes(json.dumps(root).encode())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        zarr.consolidate_metadata(MemoryStore(files))
    assert {path: buffer.to_bytes() for path, buffer in files.items()} == ours


def test_checkpoints_have_the_same_metadata_where_python_leaves_assertions_out() -> None:
    program = """
import sys
from checkpoint import metadata
from checkpoint.described import array_of
found = metadata.documents([array_of("model/weight", "float32", (8, 64), (4, 64), (2, 1))])
sys.stdout.buffer.write(found["zarr.json"])
"""
    plain, optimised = (
        subprocess.run([sys.executable, *how, "-c", program], capture_output=True, check=False) for how in ([], ["-OO"])
    )
    assert optimised.returncode == 0, optimised.stderr.decode()
    assert optimised.stdout == plain.stdout
