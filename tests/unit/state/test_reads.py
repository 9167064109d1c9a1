"""A script that goes on and reads from the beginning of an epoch again."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from attempts import AT, Attempts, Script
from torch.utils.data import DataLoader, IterableDataset, Sampler

TOLD = "has read the first batch of a DataLoader whose position is in no snapshot"
DATA = torch.arange(80 * 6, dtype=torch.float32).reshape(80, 6) / 99


class Behind(Sampler[int]):
    """It begins behind what is done."""

    done = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.done * 8, 80))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(DATA)


def batches(how: str, loader: Any, done: int) -> Iterator[torch.Tensor]:
    read = islice(iter(loader), done if how.startswith("skips") else 0, None)
    return iter(list(read)) if how == "skips before" else read


def trained(script: Script, how: str, total: int) -> None:
    """It trains on a loader, validates by another one, and gives `attach` the first one, or none."""
    if how == "stateful":
        loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="NOT TESTED HERE: torchdata is not installed")
        loader = loaders.StatefulDataLoader(DATA, batch_size=8)
    else:
        data: Any = Stream() if how == "stream" else DATA
        loader = DataLoader(data, 8, sampler=Behind() if how == "behind" else None)
    validation = DataLoader(torch.zeros(8, 6), 8)
    snapshots = script.attach() if how == "not given" else script.attach(loader=loader)
    if how == "behind":
        loader.sampler.done = snapshots.step
    read = batches(how, loader, snapshots.step)
    for _ in snapshots.steps(total):
        script.step(next(read))
        with torch.no_grad():
            next(iter(validation))


@pytest.mark.parametrize(
    ("how", "told"),
    [("given", 1), ("not given", 1), ("skips", 0), ("skips before", 0), ("behind", 0), ("stream", 0), ("stateful", 0)],
)
def test_who_begins_an_epoch_anew_is_told_once(attempts: Attempts, how: str, told: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    before = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    attempts.begin()
    trained(Script(), how, AT)
    assert TOLD not in caplog.text, "it began at the front, as it should"
    attempts.held(AT)
    attempts.begin(AT)
    trained(Script(), how, AT + 3)
    assert caplog.text.count(TOLD) == told
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is before
