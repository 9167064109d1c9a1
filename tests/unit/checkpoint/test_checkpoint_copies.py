"""A run directory that was copied, moved or linked: the commands change nothing that is not its own."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from checkpoint_commands import part, run, told
from checkpoint_state import local_shards

from checkpoint import save, steps


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
