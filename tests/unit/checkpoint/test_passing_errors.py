"""Checkpoints that cannot be read for a moment are tried again before an older one is taken."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoint import LocalShard, NoReachableCheckpoint, manifest, restoring, save, steps
from checkpoint.errors import UnreachableCheckpoint
from checkpoint.quarantine import quarantine


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


def of_generation_one(step: int, generation: int) -> bool:
    """What is invalidated where the first generation is rolled back to step 1."""
    return step > 1 and generation <= 1


def before_generation_one(step: int, generation: int) -> bool:
    """Nothing of what is there."""
    return step > 1 and generation <= 0


@pytest.mark.parametrize(("invalidated", "left"), [(of_generation_one, [1]), (before_generation_one, [1, 2])])
def test_whether_a_checkpoint_is_rolled_back_is_known_once_an_error_has_passed(
    root: Path, invalidated: Callable[[int, int], bool], left: list[int]
) -> None:
    file, away = broken(root, 2)

    def mended() -> None:
        file.unlink()
        away.rename(file)

    timer = threading.Timer(0.5, mended)
    timer.start()
    renamed = quarantine(root, invalidated, "rolled-back", generation=9)
    timer.join()
    assert (steps(root), [step for step, _ in renamed]) == (left, [step for step in (2, 1) if step not in left])


@pytest.mark.parametrize("invalidated", [of_generation_one, before_generation_one])
def test_a_checkpoint_that_may_be_rolled_back_and_cannot_be_read_is_neither_renamed_nor_passed_over(
    root: Path, invalidated: Callable[[int, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint.quarantine.PAUSES_S", (0.1,))
    broken(root, 1)  # which is not concerned
    quarantine(root, lambda step, generation: False, "rolled-back", generation=9)
    broken(root, 2)
    with pytest.raises(UnreachableCheckpoint, match=r"step-00000002 cannot be reached.*whether it was rolled back is not known"):
        quarantine(root, invalidated, "rolled-back", generation=9)
    assert steps(root) == [1, 2]


def test_a_damaged_checkpoint_is_not_taken_for_one_that_was_rolled_back(root: Path) -> None:
    (root / "step-00000002" / manifest.NAME).unlink()
    assert quarantine(root, before_generation_one, "rolled-back", generation=9) == []
    assert steps(root) == [1, 2]
