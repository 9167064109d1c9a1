"""The commands say what is there, and change nothing that they should not."""

import fcntl
import json
import math
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from checkpoint_state import local_shards
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from mounts import needs_root, small_disk
from stranger import UID, shared_place, stranger_for_a_while
from typer.testing import CliRunner

import checkpoint
from checkpoint import CheckpointMismatch, LocalShard, layout, save, save_one_by_one, steps, verify
from checkpoint.cli import app
from checkpoint.tools import aside, diff, export, listing, locations, pruning, stream, verifying
from checkpoint.tools.diff import MISSING, Comparison, Tolerance, differing_state
from checkpoint.tools.refusal import Refusal


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def told(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def whole(name: str, data: torch.Tensor, unit: tuple[int, ...] | None = None) -> LocalShard:
    return LocalShard(name, tuple(data.shape), (0,) * data.dim(), data, unit or tuple(max(1, length) for length in data.shape))


def pair(tmp_path: Path, a: Sequence[LocalShard], b: Sequence[LocalShard]) -> tuple[Path, Path]:
    return save(tmp_path / "a", 1, a, {}, generation=0).path, save(tmp_path / "b", 1, b, {}, generation=0).path


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def part(root: Path, step: int, node: int, nodes: int) -> None:
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    described = {"step": step, "generation": 2, "node": node, "nodes": nodes, "size_bytes": 3 << 20, "files": 7}
    (path / "part.json").write_text(json.dumps(described))


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """A run directory with two tiers: parts in a node's RAM, and whole checkpoints, one of which is damaged."""
    for step in (100, 200, 300):
        save(tmp_path / "checkpoints", step, local_shards(float(step)), {"step": step}, generation=1)
    (tmp_path / "checkpoints/step-00000200/manifest.json").unlink()
    part(tmp_path / "node0", 350, 0, 2)
    (tmp_path / "node0/step-00000360").mkdir()
    (tmp_path / "node0/step-00000360/part.json").write_text("{")
    tiers = [
        {"name": "ram", "durable": False, "roots": [str(tmp_path / "node0"), "/nowhere/node1"]},
        {"name": "durable", "durable": True, "roots": [str(tmp_path / "checkpoints")]},
    ]
    (tmp_path / "storage.json").write_text(json.dumps({"tiers": tiers}))
    return tmp_path


def test_ls_shows_every_tier(campaign: Path) -> None:
    lines = run("ls", campaign).stdout.splitlines()
    assert lines[0].split() == ["tier", "step", "generation", "MiB", "files", "age", "state"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["ram", "350"],
        ["ram", "360"],
        ["durable", "100"],
        ["durable", "200"],
        ["durable", "300"],
    ]
    assert "part of node 0 of 2" in lines[1]
    assert "damaged: part.json is not what a node writes" in lines[2]
    assert "committed" in lines[3]
    assert "damaged: manifest.json is missing" in lines[4]


@needs_root
def test_a_checkpoint_that_may_not_be_read_is_one_that_is_damaged() -> None:
    with shared_place() as place:
        for step in (10, 20):
            save(place / "checkpoints", step, local_shards(), {}, generation=1)
        (place / "checkpoints/step-00000010").chmod(0o000)
        for path in (place / "checkpoints").rglob("*"):
            if not path.is_relative_to(place / "checkpoints/step-00000010"):
                os.chown(path, UID, UID)
        os.chown(place / "checkpoints", UID, UID)
        with stranger_for_a_while():
            listed = told("ls", place)
            verified = run("verify", place)
            exported = run("export", place, "--format", "torch", "--out", place / "out")
        assert [(each["step"], each["state"], each["reason"]) for each in listed] == [
            (10, "damaged", "manifest.json cannot be read: Permission denied"),
            (20, "committed", None),
        ]
        assert (verified.exit_code, verified.stdout.count(": good")) == (1, 1)
        assert "step-00000010 is damaged: manifest.json cannot be read: Permission denied" in verified.stderr
        assert exported.exit_code == 0, exported.output


def test_ls_as_json(campaign: Path) -> None:
    entries = told("ls", campaign)
    assert [(each["step"], each["state"], each["durable"]) for each in entries] == [
        (350, "part", False),
        (360, "damaged", False),
        (100, "committed", True),
        (200, "damaged", True),
        (300, "committed", True),
    ]
    ram, whole_one = entries[0], entries[2]
    assert (ram["node"], ram["nodes"], ram["size_bytes"], ram["files"], ram["generation"]) == (0, 2, 3 << 20, 7, 2)
    files = [path for path in Path(whole_one["path"]).rglob("*") if path.is_file()]
    assert whole_one["files"] == len(files)
    assert whole_one["size_bytes"] == sum(path.stat().st_size for path in files if path.name != "manifest.json")
    assert 0 <= whole_one["age_s"] < 600
    assert whole_one["verified"] is None
    (alone,) = told("ls", campaign / "checkpoints/step-00000100")
    assert (alone["step"], alone["tier"]) == (100, None)


def test_ls_verifies_what_is_committed(campaign: Path) -> None:
    flip(campaign / "checkpoints/step-00000300/model/weight/c.0.0", 5000)
    found = {each["step"]: each for each in told("ls", campaign, "--verify")}
    assert {step: each["verified"] for step, each in found.items()} == {350: None, 360: None, 100: True, 200: None, 300: False}
    assert "model/weight/c.0.0" in found[300]["reason"]
    lines = run("ls", campaign, "--verify").stdout.splitlines()
    assert lines[0].split()[-1] == "verified"
    assert [line.split()[-1] for line in (lines[3], lines[5])] == ["yes", "no"]


@pytest.mark.parametrize("text", ['{"tiers": [{"name": "ram"}]}', '{"tiers": ' + "[" * 100_000], ids=["no roots", "nested deeply"])
def test_a_run_directory_that_describes_no_tiers_is_said_to(tmp_path: Path, text: str) -> None:
    (tmp_path / "storage.json").write_text(text)
    result = run("ls", tmp_path)
    assert result.exit_code == 69
    assert "does not describe storage tiers" in result.stderr


# -- copies ----------------------------------------------------------------------------------------------------------------


def original(tmp_path: Path, durable: Path | None = None) -> Path:
    """A run directory that says that it is one, with two checkpoints and a node's RAM outside of it."""
    run_dir, ram = tmp_path / "runs/a", tmp_path / "ram/node0"
    durable = durable or run_dir / "checkpoints"
    for step in (10, 20, 30):
        save(durable, step, local_shards(), {}, generation=1)
    part(ram, 35, 0, 2)
    tiers = [
        {"name": "ram", "durable": False, "roots": [str(ram)]},
        {"name": "durable", "durable": True, "roots": [str(durable)]},
    ]
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "storage.json").write_text(json.dumps({"run_dir": str(run_dir), "tiers": tiers}))
    return run_dir


def copied(run_dir: Path) -> Path:
    return Path(shutil.copytree(run_dir, run_dir.parents[1] / "copy", symlinks=True))


def test_a_copy_is_verified_and_pruned_where_it_is(tmp_path: Path) -> None:
    run_dir = original(tmp_path)
    copy = copied(run_dir)
    (copy / "checkpoints/step-00000020/manifest.json").write_bytes(b"")
    result = run("verify", copy)
    assert result.exit_code == 1
    assert f"{copy}/checkpoints/step-00000020 is damaged" in result.stderr
    assert f"{copy}/checkpoints/step-00000030: good" in result.stdout
    assert f"{copy} was copied from {run_dir}; tier ram is what {tmp_path}/ram/node0 holds" in result.stderr
    assert run("prune", copy, "--keep-last", 1, "--yes").exit_code == 0
    assert (steps(copy / "checkpoints"), steps(run_dir / "checkpoints")) == ([30], [10, 20, 30])
    itself = run("verify", run_dir)
    assert (itself.exit_code, itself.stderr) == (0, "resilient: 1 shards of nodes were left out\n")


def test_a_run_directory_that_was_moved_has_its_checkpoints(tmp_path: Path) -> None:
    run_dir = original(tmp_path)
    moved = run_dir.rename(tmp_path / "x")
    assert [each["path"] for each in told("ls", moved) if each["durable"]] == [
        f"{moved}/checkpoints/step-000000{step}" for step in (10, 20, 30)
    ]
    out = tmp_path / "out"
    assert f"from {moved}/checkpoints/step-00000030" in run("export", moved, "--format", "torch", "--out", out).stdout
    assert not run("diff", moved, moved).stderr, "what lies outside of it is still its own"
    assert run("prune", moved, "--keep-last", 1, "--yes").exit_code == 0


def test_a_run_directory_that_is_named_by_a_link_is_no_copy(tmp_path: Path) -> None:
    run_dir = original(tmp_path)
    (tmp_path / "link").symlink_to(run_dir)
    assert run("ls", tmp_path / "link").stderr == ""
    described = json.loads((run_dir / "storage.json").read_text())
    through_link = json.dumps({**described, "run_dir": str(tmp_path / "link")})
    (run_dir / "storage.json").write_text(through_link)
    assert run("ls", run_dir).stderr == ""
    copy = copied(run_dir)  # its tiers are spelled otherwise than the run directory
    assert {Path(each["path"]).parents[1] for each in told("ls", copy) if each["durable"]} == {copy}


@pytest.mark.parametrize("linked", [False, True])
def test_nothing_outside_of_a_copy_is_changed(tmp_path: Path, linked: bool) -> None:
    elsewhere = tmp_path / "scratch"
    run_dir = original(tmp_path, elsewhere)
    if linked:  # it seems to lie inside
        (run_dir / "checkpoints").symlink_to(elsewhere)
        described = (run_dir / "storage.json").read_text()
        (run_dir / "storage.json").write_text(described.replace(str(elsewhere), f"{run_dir}/checkpoints"))
    copy = copied(run_dir)
    refused = run("prune", copy, "--keep-last", 1, "--yes")
    assert refused.exit_code == 78
    assert f"{copy} was copied from {run_dir}" in refused.stderr and refused.stderr.count("\n") == 1
    assert steps(elsewhere) == [10, 20, 30]
    assert "tier durable is what" in run("verify", copy).stderr
    assert run("prune", run_dir, "--keep-last", 2, "--yes").exit_code == 0
    assert steps(elsewhere) == [20, 30]


def test_what_a_live_run_has_in_ram_is_not_flushed_through_a_copy(tmp_path: Path) -> None:
    run_dir = original(tmp_path)
    copy = copied(run_dir)
    for each in (run_dir, copy):
        each.chmod(0o700)
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is in use by" in run("flush", run_dir).stderr
        refused = run("flush", copy)
    assert refused.exit_code == 78
    assert f"{copy} was copied from {run_dir}" in refused.stderr and refused.stderr.count("\n") == 1
    assert "nothing is held that is newer" in run("flush", run_dir).stdout


def test_a_run_directory_of_an_earlier_version_is_read_as_before(campaign: Path) -> None:
    copy = shutil.copytree(campaign, campaign.with_name("copy-of-it"))
    assert [each["path"] for each in told("ls", copy)] == [each["path"] for each in told("ls", campaign)]
    assert run("ls", copy).stderr == ""


@pytest.mark.parametrize("where", [7, {}, "a\0b", ["/x"]])
def test_a_storage_file_that_names_no_run_directory_is_said_to(campaign: Path, where: Any) -> None:
    described = json.loads((campaign / "storage.json").read_text())
    (campaign / "storage.json").write_text(json.dumps({**described, "run_dir": where}))
    result = run("ls", campaign)
    assert result.exit_code == 69
    assert "does not describe storage tiers" in result.stderr


def test_verify_reads_everything_and_says_so(campaign: Path) -> None:
    found = told("verify", campaign, code=1)
    assert [(each["step"], each["good"]) for each in found] == [(100, True), (200, False), (300, True)]
    sizes = {each["step"]: each["size_bytes"] for each in told("ls", campaign)}
    assert found[0]["bytes_read"] == sizes[100]
    result = run("verify", campaign)
    assert result.stdout.count(": good") == 2
    assert "manifest.json is missing" in result.stderr
    assert "2 shards of nodes were left out" in result.stderr
    assert run("verify", campaign / "checkpoints/step-00000300").exit_code == 0


@pytest.mark.parametrize("files", [[], ["model/weight/c.0.0"]], ids=["empty", "without its manifest"])
def test_what_a_node_writes_or_removes_just_now_is_no_checkpoint(campaign: Path, tmp_path: Path, files: list[str]) -> None:
    half = campaign / "node0/step-00000999"
    half.mkdir()
    for name in files:
        (half / name).parent.mkdir(parents=True, exist_ok=True)
        (half / name).write_bytes(b"half")
    assert 999 not in {each["step"] for each in told("ls", campaign)}
    assert {each["step"] for each in told("verify", campaign, code=1)} == {100, 200, 300}, "200 is damaged"
    assert told("diff", campaign, campaign / "checkpoints/step-00000300")["a"].endswith("step-00000300")
    exported = run("export", campaign, "--format", "torch", "--out", tmp_path / "weights.pt")
    assert exported.exit_code == 0 and "step-00000300" in exported.stdout


def test_a_checkpoint_that_is_deleted_while_it_is_looked_at_is_not_damaged(campaign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(campaign / "checkpoints/step-00000200")
    vanishing = [campaign / "node0/step-00000350", campaign / "checkpoints/step-00000100"]

    def late(function: Callable[[Path], Any], gone: Path) -> Callable[[Path], Any]:
        """The same, and the directory is gone once it was asked about it."""

        def asked(path: Path) -> Any:
            found = function(path)
            if path == gone:
                shutil.rmtree(path)
            return found

        return asked

    for gone in vanishing:
        monkeypatch.setattr(listing, "is_node_shard", late(locations.is_node_shard, gone))
        assert [each["state"] for each in told("ls", campaign) if each["step"] in (100, 350)] == ["committed"] * (
            gone == vanishing[0]
        )
    save(campaign / "checkpoints", 100, local_shards(1.0), {"step": 100}, generation=1)
    monkeypatch.setattr(verifying, "size_bytes", late(verifying.size_bytes, vanishing[1]))
    assert [each["step"] for each in told("verify", campaign)] == [300]
    save(campaign / "checkpoints", 100, local_shards(1.0), {"step": 100}, generation=1)
    assert run("verify", vanishing[1]).exit_code == 69


def test_ls_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    listed = run("ls", tmp_path)
    assert (listed.exit_code, listed.stdout, listed.stderr) == (69, "", f"resilient: there is no checkpoint in {tmp_path}\n")
    assert told("ls", tmp_path, code=69) == []


def test_verify_has_nothing_to_do_without_whole_checkpoints(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for path in (campaign / "node0", tmp_path_factory.mktemp("empty")):
        result = run("verify", path)
        assert result.exit_code == 69
        assert result.stderr.startswith("resilient: there is no ")


def test_progress_counts_every_byte(root: Path, small_chunks: None) -> None:
    saved = save(root, 1, [*local_shards(), whole("scalar", torch.tensor(1.0))], {}, generation=0)
    read: list[int] = []
    verify(saved.path, progress=read.append)
    assert sum(read) == saved.bytes - (saved.path / "manifest.json").stat().st_size


def in_terminal(*arguments: object, answer: bytes = b"") -> tuple[int, str]:
    """Exit code and output of a command whose three streams are a terminal."""
    main, side = pty.openpty()
    script = "from checkpoint.cli import app; app()"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(side)
        os.write(main, answer)
        output = b""
        while True:
            try:
                output += os.read(main, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
    os.close(main)
    return process.returncode, output.decode()


def test_a_person_sees_a_bar_and_a_pipe_does_not(campaign: Path) -> None:
    code, output = in_terminal("verify", campaign / "checkpoints/step-00000100")
    assert code == 0
    assert "verifying" in output
    assert "verifying" not in run("verify", campaign / "checkpoints/step-00000100").output


def test_prune_asks_and_deletes(campaign: Path) -> None:
    root = campaign / "checkpoints"
    (root / "step-00000050.deleted-1").mkdir()
    (root / "step-00000050.deleted-1/file").write_bytes(bytes(2 << 20))
    listed = run("prune", campaign, "--keep-last", 1, "--dry-run")
    assert listed.exit_code == 0
    assert "step-00000050.deleted-1: 2.0 MiB" in listed.stdout
    assert "would delete 3 directories" in listed.stdout
    refused = run("prune", campaign, "--keep-last", 1)
    assert refused.exit_code == 1, "nobody has confirmed it"
    assert "--yes" in refused.stderr
    code, output = in_terminal("prune", campaign, "--keep-last", 1, answer=b"n\n")
    assert code == 1
    assert "nothing was deleted" in output
    assert steps(root) == [100, 200, 300]
    code, output = in_terminal("prune", campaign, "--keep-last", 1, "--keep-every", 100, answer=b"y\n")
    assert (code, steps(root)) == (0, [100, 200, 300])
    assert not list(root.glob("*.deleted-*"))
    assert run("prune", campaign, "--keep-last", 1, "--yes").exit_code == 0
    assert steps(root) == [300]
    assert steps(campaign / "node0") == [350, 360], "only the durable tier"
    again = run("prune", campaign, "--keep-last", 1)
    assert (again.exit_code, again.stdout) == (0, "nothing is superseded\n")


def test_prune_counts_what_a_campaign_that_goes_on_deletes_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    over = threading.Event()

    def campaign_goes_on() -> None:
        gone = tmp_path / "step-00000001.deleted-1"
        while not over.is_set():
            gone.mkdir()
            for number in range(40):
                (gone / f"c{number}").touch()
            shutil.rmtree(gone)

    thread = threading.Thread(target=campaign_goes_on)
    thread.start()
    try:
        for _ in range(1000):
            pruning.plans(tmp_path, 1, None)
    finally:
        over.set()
        thread.join()


def test_prune_refuses_to_leave_only_damaged_ones(campaign: Path) -> None:
    (campaign / "checkpoints/step-00000300/manifest.json").unlink()
    result = run("prune", campaign, "--keep-last", 1, "--yes")
    assert result.exit_code == 69
    assert "none of the checkpoints that would stay has a sound manifest" in result.stderr
    assert steps(campaign / "checkpoints") == [100, 200, 300]


@pytest.mark.parametrize(("arguments", "code"), [(["--keep-last", "0"], 78), (["--keep-last", "1", "--keep-every", "0"], 78)])
def test_prune_refuses_numbers_that_keep_nothing(campaign: Path, arguments: list[str], code: int) -> None:
    assert run("prune", campaign, *arguments, "--yes").exit_code == code
    assert run("prune", campaign / "checkpoints/step-00000100", "--keep-last", "1").exit_code == 78
    (campaign / "none").mkdir()
    assert run("prune", campaign / "none", "--keep-last", "1").exit_code == 69


KINDS = "bool uint8 int32 int64 uint16 uint64 float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2"


@pytest.mark.parametrize("kind", KINDS.split())
def test_diff_finds_one_element_of_every_type(tmp_path: Path, small_chunks: None, kind: str) -> None:
    values = torch.arange(600).reshape(20, 30).fmod(2).to(getattr(torch, kind))
    other = values.clone()
    other[7, 11] = 0 if bool(values[7, 11].to(torch.complex64) != 0) else 1
    a, b = pair(tmp_path, [whole("x", values, (20, 30))], [whole("x", other, (4, 5))])
    (found,) = told("diff", a, b, code=1)["arrays"]
    assert (found["differing"], found["elements"], found["max_abs"], found["max_rel"]) == (1, 600, 1.0, 1.0)
    assert not found["bit_equal"]
    c = save(tmp_path / "c", 1, [whole("x", values, (5, 30))], {}, generation=0).path
    result = run("diff", a, c)
    assert result.exit_code == 0
    assert "1 of 1 arrays in both are equal bit by bit: equal" in result.stdout


@pytest.mark.parametrize("limit", [1, 40, 1000])
def test_diff_counts_as_numpy_does_whatever_the_layouts(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(diff, "_AT_ONCE", 17)
    monkeypatch.setattr(stream.boxes, "__defaults__", (limit * 4,))
    random = np.random.default_rng(1)
    one = random.normal(size=(13, 7, 9)).astype(np.float32)
    other = np.where(random.random(one.shape) < 0.3, one * (1 + random.normal(size=one.shape) * 0.01), one).astype(np.float32)
    one[2, 3, 4] = other[2, 3, 4] = np.nan
    one[3, 3, 3] = np.nan
    a, b = pair(tmp_path, [whole("x", torch.from_numpy(one), (4, 7, 3))], [whole("x", torch.from_numpy(other), (5, 2, 9))])
    (found,) = Comparison(a, b, tolerance=Tolerance(1e-4, 1e-3)).run().arrays
    exact = one.astype(np.float64), other.astype(np.float64)
    distance, largest = np.abs(exact[0] - exact[1]), np.maximum(*map(np.abs, exact))
    assert found.differing == np.count_nonzero(one.view(np.uint32) != other.view(np.uint32))
    assert found.max_abs == np.nanmax(distance)
    assert found.max_rel == np.nanmax(distance / largest)
    assert found.beyond == np.count_nonzero(distance > 1e-4 + 1e-3 * largest) + 1
    assert (found.nan_a, found.nan_b) == (2, 1)


def test_diff_knows_the_corners_of_floats(tmp_path: Path) -> None:
    a, b = pair(
        tmp_path,
        [whole("x", torch.tensor([0.0, math.inf, math.inf, 1.0, math.nan]))],
        [whole("x", torch.tensor([-0.0, math.inf, -math.inf, math.inf, math.nan]))],
    )
    (found,) = told("diff", a, b, "--rtol", "1", code=1)["arrays"]
    assert (found["differing"], found["beyond"], found["max_abs"], found["max_rel"]) == (3, 2, "inf", 1.0)
    assert (found["nan_a"], found["nan_b"]) == (1, 1)


def test_diff_is_exact_for_large_integers(tmp_path: Path) -> None:
    low, high = -(2**63), 2**63 - 1
    a, b = pair(tmp_path, [whole("x", torch.tensor([high, low, 5]))], [whole("x", torch.tensor([high - 1, high, 5]))])
    (found,) = Comparison(a, b).run().arrays
    assert (found.differing, found.max_abs) == (2, 2.0**64)
    (close,) = Comparison(a, b, tolerance=Tolerance(atol=1.0)).run().arrays
    assert close.beyond == 1


def test_diff_with_tolerances_across_types(tmp_path: Path) -> None:
    values = torch.linspace(0.1, 1, 50)
    a, b = pair(tmp_path, [whole("x", values)], [whole("x", values.bfloat16())])
    assert run("diff", a, b).exit_code == 1
    assert run("diff", a, b, "--rtol", "0.01").exit_code == 0
    assert run("diff", a, b, "--atol", "1e-6").exit_code == 1
    refused = run("diff", a, b, "--atol", "-1")
    assert refused.exit_code == 78
    assert "a tolerance is a number from 0 on" in refused.stderr


def test_diff_of_names_shapes_scalars_and_empty_arrays(tmp_path: Path) -> None:
    same = [whole("scalar", torch.tensor(2.0)), whole("empty", torch.zeros(0, 3))]
    a, b = pair(
        tmp_path,
        [*same, whole("mine", torch.zeros(2)), whole("shape", torch.zeros(2, 3))],
        [*same, whole("yours", torch.zeros(2)), whole("shape", torch.zeros(3, 2))],
    )
    found = told("diff", a, b, "--rtol", "1", code=1)
    assert (found["only_a"], found["only_b"]) == (["mine"], ["yours"])
    assert {each["name"]: each["equal"] for each in found["arrays"]} == {"scalar": True, "empty": True, "shape": False}
    text = run("diff", a, b).stdout
    assert "only in A: mine" in text
    assert "[2, 3] / [3, 2]" in text
    assert run("diff", a, b, "--only", "s*r", "--only", "empty").exit_code == 0
    refused = run("diff", a, b, "--only", "nothing*")
    assert refused.exit_code == 78
    assert "no array is called nothing*" in refused.stderr


def test_diff_shows_the_state_which_does_not_count(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [{"a": 1, "in": {"b": [1], "c": 1, "d": None}}, {"a": 1, "in": {"b": [2], "c": 1.0}}]
    a, b = (save(tmp_path / f"{number}", 1, local_shards(), state, generation=0).path for number, state in enumerate(states))
    found = told("diff", a, b)
    assert found["state"]["in.b"] == {"a": {"value": [1]}, "b": {"value": [2]}}
    assert found["state"]["in.d"] == {"a": {"value": None}, "b": {}}
    assert "state in.d: None in A, (missing) in B" in run("diff", a, b).stdout
    assert differing_state(*states) == {"in.b": ([1], [2]), "in.c": (1, 1.0), "in.d": (None, MISSING)}


def test_diff_takes_the_newest_and_finds_damage(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = save(tmp_path_factory.mktemp("other"), 7, local_shards(300.0), {}, generation=0).path
    assert told("diff", campaign, other)["a"].endswith("step-00000300")
    flip(other / "model/weight/c.0.0", 5000 - 5000 % 4096)
    result = run("diff", campaign, other)
    assert result.exit_code == 69
    assert "wrong checksum" in result.stderr
    assert run("diff", campaign / "node0/step-00000350", other).exit_code == 78
    assert run("diff", campaign / "node0", other).exit_code == 69


shapes = st.lists(st.integers(1, 14), min_size=0, max_size=3)


@settings(deadline=None)
@given(st.data(), shapes, st.integers(1, 3000), st.sampled_from([1, 2, 4, 16]))
def test_boxes_cover_an_array_once_and_are_small(data: st.DataObject, shape: list[int], limit: int, size: int) -> None:
    cuts = st.tuples(*(st.integers(1, length) for length in shape))
    chunks = [data.draw(cuts), data.draw(cuts)]
    seen = np.zeros(shape, int)
    for offset, extent in stream.boxes(tuple(shape), size, chunks, limit):
        assert math.prod(extent) * size <= max(limit, size)
        seen[tuple(slice(start, start + length) for start, length in zip(offset, extent, strict=True))] += 1
    assert np.all(seen == 1)


def test_boxes_follow_chunks_where_they_fit() -> None:
    assert [extent for _, extent in stream.boxes((12, 8), 1, [(3, 8), (4, 4)], 96)] == [(12, 8)]
    assert {offset[0] % 12 for offset, _ in stream.boxes((48, 8), 1, [(3, 8), (4, 4)], 100)} == {0}
    assert list(stream.boxes((), 4, [(), ()])) == [((), ())]
    assert list(stream.boxes((0, 3), 4, [(1, 3)])) == []


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


@needs_root
@pytest.mark.parametrize("form", ["torch", "zarr"])
@pytest.mark.parametrize("room", [4 << 10, 200 << 10])
def test_an_export_to_a_full_disk_is_told_with_its_place(root: Path, tmp_path: Path, form: str, room: int) -> None:
    path = save(root, 1, [whole("x", torch.ones(1 << 18)), whole("y", torch.ones(10))], {}, generation=0).path
    with small_disk(tmp_path / "disk", room) as disk:
        result = run("export", path, "--format", form, "--out", disk / "out")
        assert (result.exit_code, result.stderr) == (69, f"resilient: {disk}/out: No space left on device\n")
        assert list(disk.iterdir()) == []


@needs_root
def test_a_checkpoint_that_is_imported_to_a_full_disk_is_told_with_its_place(tmp_path: Path) -> None:
    data = torch.ones(1 << 18)
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        with pytest.raises(OSError, match="No space left") as caught:
            save_one_by_one(disk, 0, [whole("x", data.to("meta"))], [whole("x", data)], {})
        assert caught.value.filename == f"{disk}/step-00000000"


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


@pytest.mark.parametrize("command", ["ls", "verify", "diff", "export", "prune"])
def test_help_imports_nothing_heavy(command: str) -> None:
    script = (
        "import sys; from checkpoint.cli import app\n"
        "try: app()\n"
        "except SystemExit: print([name for name in ('torch', 'zarr', 'numpy') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(checkpoint.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script, command, "--help"], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.endswith("[]\n")
    assert "Usage" in done.stdout


def test_ls_imports_neither_torch_nor_numpy(campaign: Path) -> None:
    script = (
        "import sys; from checkpoint.cli import app\n"
        "try: app()\n"
        "except SystemExit: print([name for name in ('torch', 'zarr', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, "ls", str(campaign)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
