"""Garbage is collected at fixed steps, and steps leave no tensors to it."""

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from trainer_ranks import run_ranks, train, write_config, write_dataset

from trainer import garbage

LOOKED_AT = 7  # behind this step the test itself collects, and keeps what it finds


def collected(config: Path, overrides: tuple[str, ...]) -> tuple[list[int], int]:
    """Train on this rank: the steps behind which garbage was collected, and the tensors in that of step 7."""
    from trainer.loop import Trainer

    at: list[int] = []
    steps_done: list[int] = []
    tensors: list[torch.Tensor] = []
    whole = Trainer._step

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start" and steps_done and not gc.isenabled():  # behind the last step it is as ever
            at.append(steps_done[-1])

    def step(self: Trainer) -> None:
        whole(self)
        steps_done.append(self.state.progress.step)
        if steps_done[-1] == LOOKED_AT:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            tensors.extend(each for each in gc.garbage if issubclass(type(each), torch.Tensor))

    gc.callbacks.append(note)
    with mock.patch.object(Trainer, "_step", step), mock.patch.object(garbage, "EVERY_STEPS", 4):
        train(config, overrides)
    assert gc.isenabled()
    return at, len(tensors)


@pytest.mark.parametrize("layout", [("parallel.dp=2",), ("parallel.pp=2", "parallel.dp=1")], ids=["dp", "pp"])
def test_garbage_is_collected_at_the_same_steps_of_all_ranks_and_tensors_do_not_wait_for_it(
    tmp_path: Path, layout: tuple[str, ...]
):
    dataset = write_dataset(tmp_path / "walks")
    found: list[Any] = run_ranks(2, collected, write_config(tmp_path, dataset), layout)
    for each in found:
        if isinstance(each, Exception):
            raise each
        assert each == ([4, LOOKED_AT, 8], 0)
