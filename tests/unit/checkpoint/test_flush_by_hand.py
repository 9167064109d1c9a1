"""`ckpt flush` of what nodes hold, beside checkpoints that are damaged, of another past, or not there at all."""

import json
import threading
from pathlib import Path

import crc32c
import pytest
import torch

from checkpoint import LocalShard, load, local_shard_of, read_state, save, shard_manifest, steps
from checkpoint.loading import contents_of, fill
from checkpoint.manifest import FileEntry
from checkpoint.manifest import read as read_manifest
from checkpoint.shard_manifest import ShardManifest
from checkpoint.source import DirectorySource
from checkpoint.tiers import copying, joint_commit
from checkpoint.tiers.copying import Copy
from checkpoint.tiers.pace import Pace
from checkpoint.tools import flushing
from checkpoint.tools.refusal import Refusal

ROWS, COLUMNS = 64, 256


def array(value: float = 0.0) -> LocalShard:
    return local_shard_of("model/w", torch.full((ROWS, COLUMNS), value))


def copy() -> Copy:
    return Copy(Pace(None), threading.Event(), lambda size_bytes: None)


class Run:
    """The directory of a run that is dead: one node's memory, and the durable tier."""

    def __init__(self, base: Path, identity: str | None = "its own") -> None:
        self.path, self._scratch = base / "run", base / "scratch"
        self.memory, self.durable = self.path / "ram/node0", self.path / "disk/checkpoints"
        self.memory.mkdir(parents=True, mode=0o700)
        self.durable.mkdir(parents=True)
        tiers = [
            {"name": name, "durable": name == "disk", "roots": [str(root)]}
            for name, root in (("ram", self.memory), ("disk", self.durable))
        ]
        described = {"run_dir": str(self.path), "tiers": tiers} | ({} if identity is None else {"identity": identity})
        (self.path / "storage.json").write_text(json.dumps(described))
        if identity is not None:
            (self.durable / ".identity").write_text(f"{identity}\n")
        for each in (self.path, self.path / "ram"):
            each.chmod(0o700)

    def committed(self, step: int, generation: int = 1) -> Path:
        return save(self.durable, step, [array(step + generation / 8)], {"of": generation}, generation=generation).path

    def held(self, step: int, generation: int = 2) -> Path:
        """The node holds a snapshot of this step."""
        path = save(self._scratch, step, [array(step + generation / 8)], {"of": generation}, generation=generation).path
        contents, source = contents_of(path)
        seals = fill(path, contents, [source], [array()])
        documents = {name: (path / name).read_bytes() for name in read_manifest(path).files if name.endswith("zarr.json")}
        files = {name: FileEntry(len(text), crc32c.crc32c(text)) for name, text in documents.items()}
        node_shard = ShardManifest(step, generation, 0, 1, array().data.nbytes, files, seals)
        target = self.memory / path.name
        copying.to_tier(DirectorySource(path, chunks=seals), node_shard, documents, target, copy())
        return target

    def flush(self) -> Path | None:
        held, root = flushing.newest(self.path)
        return None if held is None else flushing.flush(held, root, lambda size_bytes: None)


def read(path: Path) -> tuple[float, object]:
    into = array()
    load(path, [into])
    return float(into.data[0, 0]), read_state(path)["of"]


def damage(path: Path) -> None:
    file = path / "model/w/c.0.0"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)


def test_what_is_newer_than_the_newest_sound_checkpoint_is_committed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.committed(400)
    newer = run.committed(500)
    run.held(450)
    assert run.flush() is None
    damage(newer)
    flushed = run.flush()
    assert flushed is not None and read(flushed) == (450.25, 2)
    assert run.flush() is None


def test_the_same_step_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    damage(run.committed(500))
    run.held(500)
    flushed = run.flush()
    assert flushed is not None and read(flushed) == (500.25, 2)
    assert [path.name for path in run.durable.glob("*.damaged-*")] == ["step-00000500.damaged-1"]


def test_a_durable_tier_that_is_not_mounted_is_refused_and_nothing_is_made_in_its_place(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.held(450)
    run.durable.rename(tmp_path / "away")
    with pytest.raises(Refusal, match=r"is not there any more: is the file system mounted\?.*; nothing was written"):
        run.flush()
    assert not run.durable.exists()
    run.durable.mkdir()  # the mount point
    with pytest.raises(Refusal, match="is the file system mounted"):
        run.flush()
    assert not list(run.durable.iterdir())
    run.durable.rmdir()
    (tmp_path / "away").rename(run.durable)
    assert run.flush() == run.durable / "step-00000450"


def test_a_run_of_an_earlier_version_has_no_identity(tmp_path: Path) -> None:
    run = Run(tmp_path, identity=None)
    run.held(450)
    run.durable.rmdir()
    assert run.flush() == run.durable / "step-00000450"


@pytest.mark.parametrize("generation", [1, 2])
def test_a_step_of_a_past_that_was_passed_over_gives_way_to_the_one_that_the_run_goes_on_from(
    tmp_path: Path, generation: int
) -> None:
    run = Run(tmp_path)
    run.committed(500, generation)
    path = run.held(500)
    node_shard = shard_manifest.read(path)
    documents = shard_manifest.documents(path, node_shard)
    copying.flush(DirectorySource(path, chunks=node_shard.chunks), node_shard, documents, run.durable, 3, copy())
    told = joint_commit.finish(node_shard, documents, run.durable, 3)
    assert told.generation == 2
    assert read(run.durable / "step-00000500") == (500.25, 2)
    aside = [each.name for each in run.durable.glob("step-*.*")]
    assert aside == (["step-00000500.passed-over-1"] if generation == 1 else [])
    assert steps(run.durable) == [500]
    again = joint_commit.finish(node_shard, documents, run.durable, 3)  # it was committed, and nobody could say so
    assert again.generation == 2
