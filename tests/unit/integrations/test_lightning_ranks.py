"""What Lightning's Trainer keeps, on another number of ranks than it was kept by."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def hooked() -> Any:
    """Imports Lightning, which takes seconds, in the processes that run these tests alone."""
    return importlib.import_module("hooked")


def whole_epoch(hooked: Any, directory: Path) -> list[torch.Tensor]:
    found = hooked.batches_after(directory, hooked.documents_at(directory, 0, 1), same=True, distributed=True)
    assert len(found) == 20
    return list(found[:10])


def same_batches(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(("distributed", "next_batch"), [(True, 6), (False, 3)])
def test_a_fit_goes_on_after_the_batches_that_all_ranks_have_read_though_each_had_random_numbers_of_its_own(
    hooked: Any, tmp_path: Path, distributed: bool, next_batch: int
):
    batches = whole_epoch(hooked, tmp_path)
    rows = hooked.documents_at(tmp_path, 3, 2)
    found = hooked.batches_after(tmp_path, rows, same=False, distributed=distributed)
    assert same_batches(found[: 10 - next_batch], batches[next_batch:])


def test_as_many_ranks_go_on_with_the_next_batch_of_each(hooked: Any, tmp_path: Path):
    batches = whole_epoch(hooked, tmp_path)
    found = hooked.batches_after(tmp_path, hooked.documents_at(tmp_path, 3, 1), same=True, distributed=True)
    assert same_batches(found[:7], batches[3:])
