"""The order of an epoch of a loader that Accelerate has prepared: found again when a loop goes on, or else refused."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from attempts import AT, TOTAL, Attempts


@pytest.fixture
def accelerated() -> Any:
    """Imports Accelerate in the processes that run these tests alone."""
    return importlib.import_module("accelerated")


@pytest.mark.parametrize("kind", ["random", "own", "weighted", "subset"])
def test_an_order_that_is_drawn_from_the_global_random_numbers_is_refused_on_one_rank_and_on_several(accelerated: Any, kind: str):
    assert accelerated.is_refused(accelerated.prepared(kind))
    assert accelerated.is_refused(accelerated.of_two_ranks(kind))
    assert accelerated.is_refused(accelerated.of_two_ranks(kind, skipped=1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_order_that_follows_from_the_number_of_the_epoch_is_not_refused(accelerated: Any, ranks: int):
    assert not accelerated.is_refused(accelerated.prepared("random", seedable=True, ranks=ranks))
    assert not accelerated.is_refused(accelerated.prepared("in order", ranks=ranks))


@pytest.mark.parametrize(("kind", "ranks"), [("weighted", 1), ("subset", 1), ("random", 2)])
def test_an_order_that_a_generator_of_its_own_draws_is_found_again_in_the_middle_of_a_later_epoch(
    attempts: Attempts, accelerated: Any, kind: str, ranks: int
):
    expected = accelerated.losses(kind, TOTAL, ranks)
    attempts.begin()
    first = accelerated.losses(kind, AT, ranks)
    attempts.held(AT)
    attempts.begin(AT)
    assert first + accelerated.losses(kind, TOTAL, ranks) == expected


@pytest.mark.parametrize(
    ("before", "now", "split_batches", "batch"), [(3, 4, False, 9), (4, 3, False, 16), (3, 4, True, 12), (None, 4, False, 12)]
)
def test_the_next_batch_of_another_number_of_ranks_is_the_one_after_those_that_all_have_read(
    accelerated: Any, before: int | None, now: int, split_batches: bool, batch: int
):
    def rest(ranks: int) -> Any:
        return accelerated.adapter._Rest(SimpleNamespace(scaler=None, num_processes=ranks, split_batches=split_batches), [])

    saved = rest(before or 3)
    saved.batch = 12
    state = saved.state_dict()
    if before is None:  # as older snapshots have it
        state.pop("ranks", None)
    loaded = rest(now)
    loaded.load_state_dict(state)
    assert loaded.batch == batch
