"""Checkpoints that cannot be read for a moment are tried again before an older one is taken."""

import threading
from pathlib import Path

import pytest
import torch

from checkpoint import LocalShard, NoReachableCheckpoint, manifest, restoring, save


def array() -> LocalShard:
    return LocalShard("model/weight", (8, 64), (0, 0), torch.zeros(8, 64), (8, 64))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        shard = array()
        shard.data.fill_(step)
        save(tmp_path, step, [shard], {}, generation=1)
    return tmp_path


def broken(root: Path, step: int) -> tuple[Path, Path]:
    """The manifest of a step gives EIO; where it is, and where it was moved to."""
    file = root / f"step-{step:08d}" / manifest.NAME
    away = root.parent / f"away-{step}"
    file.rename(away)
    file.symlink_to("/proc/self/mem")  # which cannot be read at its beginning
    return file, away


def test_an_input_output_error_that_passes_costs_no_step(root: Path) -> None:
    file, away = broken(root, 2)

    def mended() -> None:
        file.unlink()
        away.rename(file)

    timer = threading.Timer(1.5, mended)
    timer.start()
    into = array()
    found = restoring.restore(root, lambda state: [into])
    timer.join()
    assert found is not None and found.step == 2
    assert float(into.data[0, 0]) == 2.0


def test_one_that_does_not_pass_costs_the_step_and_leaves_the_older_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "PAUSES_S", (0.1,))
    broken(root, 2)
    rejected: list[int] = []
    found = restoring.restore(root, lambda state: [array()], on_reject=lambda step, tier, reason: rejected.append(step))
    assert found is not None and (found.step, rejected) == (1, [2])
    broken(root, 1)
    with pytest.raises(NoReachableCheckpoint, match="may be sound"):
        restoring.restore(root, lambda state: [array()])
