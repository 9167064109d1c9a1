"""Files that say which files there are, and how much is in them, written by somebody who means harm."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import pytest

from checkpoint import manifest, metadata, safe_name, sealed, shard_manifest
from checkpoint.errors import CheckpointError, DamagedCheckpoint
from checkpoint.layout import arrange
from checkpoint.tiers import blueprint
from checkpoint.tools import flushing

PATH = Path("step-00000007")
MOST_BYTES = 20 << 20


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Whatever a file says, reading it takes memory in proportion to its own length."""
    tracemalloc.start()
    yield
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < MOST_BYTES, f"{most} bytes"


BAD_NAMES = [
    "../../.bashrc",
    "/etc/passwd",
    "model/../../x/zarr.json",
    "model//c.0",
    "./zarr.json",
    "model/zarr.json\0",
    "model/c.0\nmodel/c.1",
    "",
    "a/" * 600 + "c.0",
    "\ud800/zarr.json",
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=range(len(BAD_NAMES)))
def test_a_name_that_leads_out_of_its_directory_is_none(name: str) -> None:
    for read in (safe_name.safe_name, safe_name.metadata_name, safe_name.shard_name, safe_name.checkpoint_name):
        with pytest.raises(ValueError, match="is not"):
            read(name)


@pytest.mark.parametrize("name", ["model/.bashrc", "model/weight", "bin/sh", "c.0", "model/c.x", "run.py"])
def test_files_of_a_checkpoint_have_known_names_only(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of"):
        safe_name.checkpoint_name(name)


def test_the_names_of_a_checkpoint_are_good() -> None:
    for name in ("zarr.json", "model/zarr.json", "model/layers/qkv.weight/c.0.12", "model/step/c"):
        assert safe_name.checkpoint_name(name) == name


@pytest.mark.parametrize("name", ["model/weight", "a", "e/" * 506 + "bc", "x/" + "n" * 255, "c.0", "%09"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 0, 10**4, 1)])
def test_an_array_that_may_be_written_has_files_that_are_read(name: str, shape: tuple[int, ...]) -> None:
    try:
        safe_name.array_name(name, shape)
    except ValueError:
        assert len(name) + len("/zarr.json") > safe_name.MOST_BYTES - 2 * len(shape)
        return
    info = arrange(name, "float32", shape, tuple(max(1, length) for length in shape))
    for file in (*metadata.documents([info]), *(shard.path for shard in info.shards.values())):
        assert safe_name.checkpoint_name(file) == file


@pytest.mark.parametrize("name", ["model/a\tb/c.0", "model/a\nb/zarr.json", "a/" * 600 + "c.0", "model/run.py"])
def test_no_manifest_is_written_that_could_not_be_read(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of"):
        manifest.encode(manifest.Manifest(7, 1, {name: manifest.FileEntry(5, 0)}))
    for files, chunks in (({name: manifest.FileEntry(5, 0)}, {}), ({}, {name: {0: 0}})):
        with pytest.raises(ValueError, match="is not the name of"):
            shard_manifest.encode(shard_manifest.ShardManifest(7, 1, 0, 1, 5, files, chunks))


# -- part.json ---------------------------------------------------------------------------------------------------------------


def part(**changes: Any) -> bytes:
    document: dict[str, Any] = {"format": shard_manifest.FORMAT, "version": 1, "step": 7, "generation": 1, "node": 0, "nodes": 1}
    document |= {"size_bytes": 4096, "files": {}, "chunks": {"a/c.0": {"runs": [[0, 2]], "crc32c": "0" * 16}}}
    return sealed.seal(document | changes)


def chunks(runs: Any, crcs: Any = "0" * 16, name: str = "a/c.0") -> dict[str, Any]:
    return {"chunks": {name: {"runs": runs, "crc32c": crcs}}}


PARTS: dict[str, dict[str, Any]] = {
    "a run of a thousand million": chunks([[0, 10**9]]),
    "many runs of a thousand million": chunks([[0, 10**9]] * 1000),
    "a negative slot": chunks([[-2, 2]]),
    "a run of none": chunks([[0, 0], [0, 2]]),
    "runs that overlap": chunks([[0, 1], [0, 1]]),
    "a run of text": chunks([["0", "2"]]),
    "no checksums": chunks([[0, 2]], "zz" * 8),
    "a signed checksum": chunks([[0, 2]], "+0000001-0000001"),
    "a chunk outside": chunks([[0, 2]], name="../../a/c.0"),
    "a file outside": {"files": {"../../.bashrc": {"size": 1, "crc32c": "0" * 8}}},
    "a file of another kind": {"files": {".bashrc": {"size": 1, "crc32c": "0" * 8}}},
    "a negative size": {"files": {"zarr.json": {"size": -1, "crc32c": "0" * 8}}},
    "an infinite step": {"step": float("inf")},
    "a step that has no name": {"step": 10**9},
    "a thousand million nodes": {"nodes": 10**9},
    "a node that is none of them": {"node": 1},
    "a list of files": {"files": []},
    "true for a number": {"nodes": True},
}


@pytest.mark.parametrize("what", PARTS)
def test_a_part_that_says_what_cannot_be_is_damaged(what: str) -> None:
    assert shard_manifest.decode(PATH, part()).chunks == {"a/c.0": {0: 0, 1: 0}}
    with pytest.raises(DamagedCheckpoint):
        shard_manifest.decode(PATH, part(**PARTS[what]))


def nested(text: bytes) -> bytes:
    """A sealed text with a member that is nested a hundred thousand deep."""
    body = text[: text.rindex(b',\n "crc32c"')] + b',\n "deep": ' + b"[" * 100_000 + b"]" * 100_000
    return body + b',\n "crc32c": "%08x"\n}\n' % crc32c.crc32c(body)


def test_json_that_is_nested_deeply_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        shard_manifest.decode(PATH, nested(part()))
    path = tmp_path / "step-00000007"
    path.mkdir()
    (path / manifest.NAME).write_bytes(nested(manifest.encode(manifest.Manifest(7, 1, {}))))
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        manifest.read(path)
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        metadata.parse(PATH, b"[" * 100_000 + b"]" * 100_000)


# -- manifest.json -----------------------------------------------------------------------------------------------------------

MANIFESTS: dict[str, dict[str, Any]] = {
    "a file outside": {"files": {"../step-00000001/zarr.json": {"size": 1, "crc32c": "0" * 8}}},
    "a file of another kind": {"files": {"sitecustomize.py": {"size": 1, "crc32c": "0" * 8}}},
    "a negative size": {"files": {"zarr.json": {"size": -5, "crc32c": "0" * 8}}},
    "a size of text": {"files": {"zarr.json": {"size": "5", "crc32c": "0" * 8}}},
    "a checksum of text": {"files": {"zarr.json": {"size": 5, "crc32c": "0x000001"}}},
    "an infinite generation": {"generation": float("inf")},
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_says_what_cannot_be_is_damaged(tmp_path: Path, what: str) -> None:
    path = tmp_path / "step-00000007"
    path.mkdir()
    document = {"format": manifest.FORMAT, "version": 1, "step": 7, "generation": 1, "files": {}}
    (path / manifest.NAME).write_bytes(sealed.seal(document | MANIFESTS[what]))
    with pytest.raises(DamagedCheckpoint):
        manifest.read(path)


# -- metadata of arrays ------------------------------------------------------------------------------------------------------


def described(change: Callable[[dict[str, Any]], None], name: str = "model/weight") -> bytes:
    """The root's metadata of one array, changed."""
    document = json.loads(metadata.documents([arrange("model/weight", "float32", (64, 64), (64, 64))])[metadata.NAME])
    document["attributes"] = {metadata.ATTRIBUTE: {"version": 1, "step": 7, "generation": 1, "state": {}}}
    members = document["consolidated_metadata"]["metadata"]
    members[name] = members.pop("model/weight")
    change(members[name])
    return json.dumps(document).encode()


def sharding(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = entry["codecs"][0]["configuration"]
    return found


def many_chunks(entry: dict[str, Any]) -> None:
    entry["shape"] = [1 << 28, 64]
    sharding(entry)["chunk_shape"] = [1, 1]
    entry["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 28, 64]


def many_files(entry: dict[str, Any]) -> None:
    entry["shape"] = [1 << 28, 64]
    sharding(entry)["chunk_shape"] = entry["chunk_grid"]["configuration"]["chunk_shape"] = [1, 1]


ARRAYS: dict[str, Callable[[dict[str, Any]], object]] = {
    "chunks of nothing": lambda entry: sharding(entry).update(chunk_shape=[0, 64]),
    "shards of nothing": lambda entry: entry["chunk_grid"]["configuration"].update(chunk_shape=[0, 0]),
    "a shape of text": lambda entry: entry.update(shape=["64", "64"]),
    "a shape that is text": lambda entry: entry.update(shape="64"),
    "a negative shape": lambda entry: entry.update(shape=[-64, 64]),
    "a shape beyond all memory": lambda entry: entry.update(shape=[1 << 59, 1 << 59]),
    "a thousand dimensions": lambda entry: entry.update(shape=[1] * 1000),
    "other dimensions": lambda entry: entry.update(shape=[64]),
    "true for a number": lambda entry: entry.update(shape=[True, 64]),
    "chunks larger than the array": lambda entry: sharding(entry).update(chunk_shape=[128, 64]),
    "more chunks than a file has": many_chunks,
    "more files than there are": many_files,
    "elements of no known type": lambda entry: entry.update(data_type="object"),
    "elements that are a list": lambda entry: entry.update(data_type=["float32"]),
    "no codecs": lambda entry: entry.update(codecs=[]),
}


@pytest.mark.parametrize("what", ARRAYS)
def test_arrays_that_cannot_be_are_damaged_before_anything_is_computed_from_them(what: str) -> None:
    assert metadata.parse(PATH, described(lambda entry: None)).arrays["model/weight"].shape == (64, 64)
    with pytest.raises(DamagedCheckpoint):
        metadata.parse(PATH, described(lambda entry: ARRAYS[what](entry) and None))


@pytest.mark.parametrize("name", ["../../home/me/.ssh", "/etc", "model/../../x", "model//weight", ""])
def test_an_array_whose_name_leads_out_of_the_checkpoint_is_damaged(name: str) -> None:
    with pytest.raises(DamagedCheckpoint):
        metadata.parse(PATH, described(lambda entry: None, name))


# -- blueprints --------------------------------------------------------------------------------------------------------------


def test_a_blueprint_names_files_of_its_own_directory_and_slots_of_its_own_files(tmp_path: Path) -> None:
    info = arrange("a", "float32", (64, 64), (64, 64))
    digest = blueprint.arrays_digest([info])
    blueprint.write_arrays(tmp_path, [info], {"zarr.json": b"{}"})
    blueprint.write_slots(tmp_path, 0, 1, digest, {"a/c.0.0": [0]})
    assert blueprint.read(tmp_path, digest, [0]).slots == {"a/c.0.0": [0]}
    for slots in ({"a/c.0.0": [[0, 10**9]]}, {"a/c.0.0": [[-1, 1]]}, {"../a/c.0.0": [[0, 1]]}, {"a/c.9.9": [[0, 1]]}):
        (tmp_path / "slots-rank0.json").write_text(json.dumps({"generation": 1, "digest": digest, "slots": slots}))
        with pytest.raises(ValueError, match="holds no blueprint"):
            blueprint.read(tmp_path, digest, [0])
    blueprint.write_slots(tmp_path, 0, 1, digest, {"a/c.0.0": [0]})
    for documents in ({"/etc/cron.d/x": "* * * * *"}, {"../zarr.json": "{}"}):
        text = {"arrays": blueprint.describe([info]), "documents": documents}
        blueprint.arrays_path(tmp_path, digest).write_text(json.dumps(text))
        with pytest.raises(ValueError, match="holds no blueprint"):
            blueprint.read(tmp_path, digest, [0])
    with pytest.raises(ValueError, match="is not the name"):
        blueprint.arrays_path(tmp_path, "x/../../../y")


# -- ckpt flush --------------------------------------------------------------------------------------------------------------


def test_a_flush_writes_nothing_outside_of_the_checkpoint(tmp_path: Path) -> None:
    run_dir, held = tmp_path / "run", tmp_path / "ram/gpt/node0/step-00000007"
    held.mkdir(parents=True, mode=0o700)
    (run_dir / "checkpoints").mkdir(parents=True, mode=0o700)
    tiers = [
        {"name": "ram", "durable": False, "roots": [str(held.parent)]},
        {"name": "durable", "durable": True, "roots": [str(run_dir / "checkpoints")]},
    ]
    (run_dir / "storage.json").write_text(json.dumps({"tiers": tiers}))
    text, evil = described(lambda entry: None), b"alias ls='rm -rf ~'"
    (held / metadata.NAME).write_bytes(text)
    (held.parents[1] / ".bashrc").write_bytes(evil)
    files = {name: {"size": len(data), "crc32c": f"{crc32c.crc32c(data):08x}"} for name, data in ((metadata.NAME, text),)}
    files["../../.bashrc"] = {"size": len(evil), "crc32c": f"{crc32c.crc32c(evil):08x}"}
    (held / shard_manifest.NAME).write_bytes(part(files=files, chunks={}))
    try:
        found, root = flushing.newest(run_dir)
        if found is not None:
            flushing.flush(found, root, lambda size_bytes: None)
    except CheckpointError:
        pass
    assert not (run_dir / ".bashrc").exists() and not list(tmp_path.glob("run/**/.bashrc"))
