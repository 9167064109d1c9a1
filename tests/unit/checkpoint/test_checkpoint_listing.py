"""`resilient ckpt ls`: what is there is shown, whatever state it is in."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_commands import flip, run, told
from checkpoint_state import local_shards
from mounts import needs_root
from stranger import UID, shared_place, stranger_for_a_while

from checkpoint import save
from checkpoint.tools import listing, locations, verifying


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


def test_ls_marks_links_also_those_that_lead_nowhere(campaign: Path, tmp_path: Path) -> None:
    root = campaign / "checkpoints"
    elsewhere, gone = tmp_path / "elsewhere", tmp_path / "gone"
    (root / "step-00000100").rename(elsewhere)
    (root / "step-00000100").symlink_to(elsewhere)
    (root / "step-00000090").symlink_to(gone)
    found = {each["step"]: each for each in told("ls", campaign) if each["durable"]}
    assert list(found) == sorted(found)
    assert (found[100]["state"], found[100]["link"]) == ("committed", str(elsewhere))
    assert (found[90]["state"], found[90]["link"], found[90]["size_bytes"]) == ("damaged", str(gone), None)
    lines = run("ls", campaign, "--verify").stdout.splitlines()
    assert any(f"committed (a link to {elsewhere})" in line and line.split()[1] == "100" for line in lines)
    assert any(f"damaged (a link to {gone}): there is no directory where it leads" in line for line in lines)


def test_ls_tells_of_what_cannot_be_looked_at_among_the_others(campaign: Path) -> None:
    (campaign / "checkpoints/step-00000090").symlink_to("x" * 300)
    found = {each["step"]: each for each in told("ls", campaign) if each["durable"]}
    assert {step: each["state"] for step, each in found.items()} == {
        90: "damaged",
        100: "committed",
        200: "damaged",
        300: "committed",
    }
    assert found[90]["reason"] == "manifest.json cannot be read: File name too long"


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


@pytest.mark.parametrize("where", [7, {}, "a\0b", ["/x"]])
def test_a_storage_file_that_names_no_run_directory_is_said_to(campaign: Path, where: Any) -> None:
    described = json.loads((campaign / "storage.json").read_text())
    (campaign / "storage.json").write_text(json.dumps({**described, "run_dir": where}))
    result = run("ls", campaign)
    assert result.exit_code == 69
    assert "does not describe storage tiers" in result.stderr


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
