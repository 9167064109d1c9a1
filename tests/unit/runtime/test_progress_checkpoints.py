"""Checkpoints that a script writes by itself, as they are told of: real files, renamed and cut off."""

import contextlib
import inspect
import pickle
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from watched_rank import Watched


def test_a_checkpoint_of_its_own_is_told_once_the_script_has_gone_on(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    save({"early": 1}, tmp_path / "arguments.pt")
    watched.step(optimizer, optimizer)
    save(watched.model.state_dict(), tmp_path / "partial")
    (tmp_path / "partial").rename(tmp_path / "model.pt")
    assert watched.told("script_checkpoint") == []
    watched.step(optimizer)
    (told,) = watched.told("script_checkpoint")
    assert (told["step"], told["path"], told["files"]) == (2, str(tmp_path / "model.pt"), 1)
    assert told["bytes"] == (tmp_path / "model.pt").stat().st_size


def test_checkpoints_are_told_of_a_script_that_has_no_optimizer(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    now = time.time()
    monkeypatch.setattr("resilient.clock.now", lambda: now)
    for seconds, name in ((0.0, "arguments"), (5.0, "vocabulary"), (100.0, "first"), (100.5, "its other half"), (200.0, "second")):
        monkeypatch.setattr("resilient.clock.now", lambda t=now + seconds: t)
        save({}, tmp_path / name)
    told = watched.told("script_checkpoint")
    assert [(each["step"], each["files"]) for each in told] == [(0, 2)], "what it starts with is none, and the last one is not over"
    watched.progress.ends()
    assert [each["path"] for each in watched.told("script_checkpoint")] == [str(tmp_path / "second")]


def test_what_was_written_before_a_save_that_failed_is_no_part_of_the_next_checkpoint(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    began = time.time()
    for seconds, name in ((100.0, "half"), (100.5, "nowhere/its other half"), (200.0, "second"), (300.0, "third")):
        monkeypatch.setattr("resilient.clock.now", lambda t=began + seconds: t)
        with contextlib.suppress(RuntimeError):
            save({}, tmp_path / name)
    assert [each["path"] for each in watched.told("script_checkpoint")] == [str(tmp_path / "second")]


def test_a_checkpoint_is_told_by_the_name_that_its_folder_has_then(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    watched.step(optimizer)
    (tmp_path / "partial").mkdir()
    for name in ("model.pt", "optimizer.pt"):
        save({}, tmp_path / "partial" / name)
    (tmp_path / "partial").rename(tmp_path / "step-1")
    watched.step(optimizer)
    assert [each["path"] for each in watched.told("script_checkpoint")] == [str(tmp_path / "step-1")]


def test_a_checkpoint_is_told_although_something_beside_it_is_gone_once_it_is_listed(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()

    def written(_: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(100))
        (folder / "rng-1.tmp").symlink_to("gone")  # listed, and not there: another rank has renamed its file meanwhile

    save = watched.progress.files._wrapped(written, lambda args, _: Path(args[1]))
    watched.step(optimizer)
    save({}, tmp_path / "step-1")
    watched.step(optimizer)
    assert [(each["path"], each["bytes"]) for each in watched.told("script_checkpoint")] == [(str(tmp_path / "step-1"), 100)]


def test_a_checkpoint_that_could_not_be_finished_is_none(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    watched.step(optimizer)
    save({}, tmp_path / "one")
    with pytest.raises(RuntimeError):
        save({}, tmp_path / "nowhere/two")
    assert watched.agent.activity().phase == "snapshot"
    watched.progress.ends()
    assert watched.told("script_checkpoint") == []


def test_functions_that_write_checkpoints_are_given_to_other_processes_by_their_names(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    """As a pool of processes that writes in the background pickles them."""
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint.filesystem", raising=False)  # the rest is wrapped
    for module, name in ((torch, "save"), (torch.serialization, "save"), (safetensors.torch, "serialize_file")):
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    save = torch.save
    watched.progress.files.wrap()
    assert torch.save is torch.serialization.save and torch.save is not save
    for function in (torch.save, torch.serialization.save, safetensors.torch.serialize_file):
        assert pickle.loads(pickle.dumps(function)) is function
    watched.progress.files.wrap()
    assert torch.save.__wrapped__ is save, "wrapped once"
