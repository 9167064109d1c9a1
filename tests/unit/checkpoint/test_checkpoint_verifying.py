"""`resilient ckpt verify`: every byte is read, and how far it is is shown."""

from pathlib import Path

import pytest
import torch
from checkpoint_commands import in_terminal, run, told, whole
from checkpoint_state import local_shards

from checkpoint import save, verify


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


def test_a_person_sees_a_bar_and_a_pipe_does_not(campaign: Path) -> None:
    code, output = in_terminal("verify", campaign / "checkpoints/step-00000100")
    assert code == 0
    assert "verifying" in output
    assert "verifying" not in run("verify", campaign / "checkpoints/step-00000100").output
