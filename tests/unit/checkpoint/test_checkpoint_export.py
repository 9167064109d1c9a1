"""`resilient ckpt export`: what is written, and that it replaces nothing but an export."""

import shutil
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from checkpoint_commands import flip, run, whole
from checkpoint_state import local_shards
from click.testing import Result

from checkpoint import CheckpointMismatch, layout, save, verify
from checkpoint.tools import aside, export, stream
from checkpoint.tools.refusal import Refusal


@pytest.fixture
def mixed(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of several types, in small chunks and two local shards."""
    with monkeypatch.context() as patch:
        patch.setattr(layout, "CHUNK_TARGET_BYTES", 256)
        written = [
            *local_shards(0.5),
            whole("model/half", torch.linspace(-3, 3, 1000).bfloat16().reshape(50, 20), (10, 5)),
            whole("model/bits", torch.arange(6).to(torch.uint16)),
            whole("model/double", torch.linspace(0, 1, 7, dtype=torch.float64)),
            whole("scalar", torch.tensor(3)),
            whole("empty", torch.zeros(0, 2)),
        ]
        return save(root, 3, written, {"samples": 5, "deep": {"list": [1, None, "x"]}}, generation=2).path


def test_export_to_torch(mixed: Path, tmp_path: Path) -> None:
    result = run("export", mixed.parent, "--format", "torch", "--out", tmp_path / "all.pt")
    assert result.exit_code == 0, result.output
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found.pop("state") == {"samples": 5, "deep": {"list": [1, None, "x"]}}
    assert set(found) == {"model/weight", "optimizer/moment", "model/half", "model/bits", "model/double", "scalar", "empty"}
    assert torch.equal(found["model/half"], torch.linspace(-3, 3, 1000).bfloat16().reshape(50, 20))
    assert torch.equal(found["model/weight"], torch.arange(24.0).reshape(6, 4) + 0.5)
    assert (found["scalar"].item(), tuple(found["empty"].shape)) == (3, (0, 2))
    assert run("export", mixed, "--format", "torch", "--out", tmp_path / "m.pt", "--only", "model/*", "--float32").exit_code == 0
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    kinds = {name: data.dtype for name, data in found.items() if name != "state"}
    names = ("model/weight", "model/half", "model/double")
    assert kinds == {**dict.fromkeys(names, torch.float32), "model/bits": torch.uint16}


@pytest.mark.parametrize("float32", [False, True])
def test_export_to_zarr(mixed: Path, tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, float32: bool) -> None:
    monkeypatch.setattr(stream.boxes, "__defaults__", (300,))
    options = ["--float32"] if float32 else []
    result = run("export", mixed, "--format", "zarr", "--out", tmp_path / "plain", *options)
    assert result.exit_code == 0, result.output
    ours, theirs = zarr.open_group(mixed, mode="r"), zarr.open_group(tmp_path / "plain", mode="r")
    assert dict(theirs.attrs) == dict(ours.attrs)
    for name in ("model/weight", "optimizer/moment", "model/half", "model/bits", "model/double", "scalar", "empty"):
        one, other = ours[name], theirs[name]
        assert isinstance(one, zarr.Array) and isinstance(other, zarr.Array)
        assert other.shards is None
        if name == "model/half" and float32:
            assert (other.dtype, dict(other.attrs)) == (np.float32, {})
            wanted = torch.from_numpy(np.asarray(one[...]).view(np.int16)).view(torch.bfloat16).float().numpy()
            assert np.array_equal(other[...], wanted)
            assert other.chunks == (10, 20)
        else:
            assert dict(other.attrs) == dict(one.attrs)
            assert np.array_equal(other[...], np.asarray(one[...]).astype(other.dtype))
            assert other.dtype == (np.float32 if name == "model/double" and float32 else one.dtype)


def test_the_size_of_chunks_that_is_told_is_theirs(root: Path, tmp_path: Path) -> None:
    path = save(root, 1, [whole("x", torch.ones(3 << 20))], {}, generation=0).path
    result = run("export", path, "--format", "zarr", "--out", tmp_path / "plain")
    assert "1 arrays in chunks of about 2 MiB" in result.stdout
    array = zarr.open_group(tmp_path / "plain", mode="r")["x"]
    assert isinstance(array, zarr.Array) and array.chunks == ((2 << 20) // 4,)


def test_export_overwrites_only_what_it_may(mixed: Path, tmp_path: Path) -> None:
    def tried(out: Path, *options: str, form: str = "zarr") -> Result:
        return run("export", mixed, "--format", form, "--out", out, *options)

    out = tmp_path / "out"
    assert tried(out).exit_code == 0
    refused = tried(out)
    assert refused.exit_code == 78
    assert "--force replaces it" in refused.stderr
    assert tried(out, "--force", "--only", "scalar").exit_code == 0
    assert [name for name, _ in zarr.open_group(out, mode="r").arrays()] == ["scalar"]
    assert tried(out, "--force", form="torch").exit_code == 0
    assert out.is_file()
    assert tried(out, "--force").exit_code == 0
    assert out.is_dir()
    copy = tmp_path / "copy"
    shutil.copytree(mixed, copy)
    for place in (mixed, mixed / "model/x", mixed.parent, tmp_path, copy):
        assert tried(place, "--force").exit_code == 78, place
    verify(mixed)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "copy", "checkpoints"}


NOTES = ("thesis.txt", "model/thesis.txt", "model/weight/thesis.txt", "model/weight/c/thesis.txt")


@pytest.mark.parametrize("form", ["torch", "zarr"])
@pytest.mark.parametrize("note", NOTES)
def test_an_export_that_somebody_has_put_something_into_is_not_replaced(mixed: Path, tmp_path: Path, form: str, note: str) -> None:
    out = tmp_path / "out"
    assert run("export", mixed, "--format", "zarr", "--out", out).exit_code == 0
    (out / note).write_text("years of work")
    result = run("export", mixed, "--format", form, "--out", out, "--force")
    assert result.exit_code == 78
    assert "has other things in it" in result.stderr
    assert (out / note).read_text() == "years of work"


@pytest.mark.parametrize("form", ["torch", "zarr"])
@pytest.mark.parametrize(
    "files",
    [
        ("proj/config.json", "proj/thesis.txt"),
        ("proj/config.json", "proj/tokenizer.json/thesis.txt"),
        ("proj/zarr.json", "proj/c"),
        ("proj",),
    ],
)
def test_what_is_no_export_is_not_replaced(mixed: Path, tmp_path: Path, form: str, files: Sequence[str]) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"node_type": "array", "attributes": {}}')
    (tmp_path / "link").symlink_to("proj")
    for out in ("proj", "link"):
        result = run("export", mixed, "--format", form, "--out", tmp_path / out, "--force")
        assert (result.exit_code, result.stderr.count("\n")) == (78, 1), result.output
    assert all((tmp_path / name).is_file() for name in files)
    assert (tmp_path / "link").is_symlink()


def test_an_export_to_hugging_face_is_replaced(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in aside.HUGGING_FACE:
        (tmp_path / "out" / name).write_text("{}")
    assert run("export", mixed, "--format", "torch", "--out", tmp_path / "out", "--force").exit_code == 0
    assert (tmp_path / "out").is_file()


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_an_export_takes_no_name_that_the_run_writes(mixed: Path, tmp_path: Path, force: Sequence[str]) -> None:
    (tmp_path / "storage.json").write_text("{}")
    torch.save({}, tmp_path / "metrics.prom")
    before = sorted(tmp_path.iterdir())
    for name in ("events.jsonl", "events.jsonl.1", "metrics.prom", ".past", "logs/x", "checkpoints/x/y", "data/x.pt"):
        result = run("export", mixed, "--format", "torch", "--out", tmp_path / name, *force)
        assert (result.exit_code, result.stderr.count("\n")) == (78, 1), (name, result.output)
        assert f"is of the run in {tmp_path}" in result.stderr
    assert sorted(tmp_path.iterdir()) == before
    for name in ("data.pt", "exports/all.pt"):
        assert run("export", mixed, "--format", "torch", "--out", tmp_path / name, *force).exit_code == 0


@pytest.mark.parametrize("form", ["torch", "zarr"])
def test_a_failed_export_leaves_nothing(mixed: Path, tmp_path: Path, form: str) -> None:
    flip(mixed / "model/weight/c.0.0", 4096)
    out = tmp_path / "out"
    torch.save({"state": "before"}, out)
    result = run("export", mixed, "--format", form, "--out", out, "--force")
    assert result.exit_code == 69
    assert "wrong checksum" in result.stderr
    assert torch.load(out, weights_only=True) == {"state": "before"}
    assert {path.name for path in tmp_path.iterdir()} == {"out", "checkpoints"}
    assert run("export", mixed, "--format", form, "--out", tmp_path / "x", "--only", "nothing").exit_code == 78


def pretend(path: Path, output: Path, *, float32: bool) -> str:
    if float32:
        output.mkdir()
        raise CheckpointMismatch("no such model")
    output.mkdir()
    (output / "config.json").write_text(path.name)
    return "a pretence"


def test_other_packages_export_too(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(form: str, *options: str) -> Result:
        return run("export", mixed, "--format", form, "--out", tmp_path / "out", *options)

    monkeypatch.setattr(export, "entry_points", lambda group: [])
    missing = tried("hf")
    assert missing.exit_code == 69
    assert "no installed package exports to hf" in missing.stderr
    monkeypatch.setattr(export, "entry_points", lambda group: [EntryPoint("hf", f"{__name__}:pretend", group)])
    unknown = tried("onnx")
    assert unknown.exit_code == 78
    assert "there are hf, torch, zarr" in unknown.stderr
    assert tried("hf", "--only", "model/*").exit_code == 78
    failed = tried("hf", "--float32")
    assert (failed.exit_code, failed.stderr) == (78, "resilient: no such model\n")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}
    done = tried("hf")
    assert "a pretence" in done.stdout
    assert (tmp_path / "out/config.json").read_text() == mixed.name


def test_a_state_array_cannot_hide_the_state(root: Path, tmp_path: Path) -> None:
    path = save(root, 1, [whole("state", torch.zeros(1))], {}, generation=0).path
    with pytest.raises(Refusal, match="an array is called state"):
        export.export(path, "torch", tmp_path / "out")
