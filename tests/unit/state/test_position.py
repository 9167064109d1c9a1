"""The position of a data loader on another number of ranks."""

from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from resilient.state.position import Position

loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="NOT TESTED HERE: torchdata is not installed")
SAMPLES = list(range(48))


def loader(rank: int, ranks: int, *, epoch: int = 2, distributed: bool = True, workers: int = 0, every: int = 1) -> Any:
    sampler = DistributedSampler(SAMPLES, num_replicas=ranks, rank=rank, shuffle=True, seed=7)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    sampled = sampler if distributed else None
    return loaders.StatefulDataLoader(SAMPLES, batch_size=2, sampler=sampled, num_workers=workers, snapshot_every_n_steps=every)


def read(iterator: Any, batches: int) -> set[int]:
    return {int(number) for _ in range(batches) for number in next(iterator)}


@pytest.mark.parametrize(
    ("before", "now", "workers", "every"),
    [(2, 1, 0, 1), (2, 4, 0, 1), (4, 2, 0, 1), (1, 4, 0, 1), (2, 1, 2, 1), (1, 2, 2, 3), (2, 1, 1, 99)],
)
def test_what_all_ranks_have_read_of_a_distributed_sampler_is_not_read_again(before: int, now: int, workers: int, every: int):
    saved, seen = [], set()
    for rank in range(before):
        mine = loader(rank, before, workers=workers, every=every)
        seen |= read(iter(mine), 4)
        saved.append(Position(mine).capture())
    rest: set[int] = set()
    for rank in range(now):
        mine = loader(rank, now, epoch=0, workers=workers, every=every)
        Position(mine).restore(saved, now, same=False)
        assert mine.sampler.epoch == 2
        rest |= {int(number) for batch in mine for number in batch}
    assert not seen & rest and seen | rest == set(SAMPLES)


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0), (2, 2)])
def test_a_position_that_was_taken_over_is_taken_over_again_also_by_another_number_of_workers(before: int, now: int):
    mine = loader(0, 1, workers=before)
    seen = read(iter(mine), 6)
    saved = [Position(mine).capture()]
    taken_over = []
    for rank in range(2):
        other = loader(rank, 2, epoch=0, workers=now)
        Position(other).restore(saved, 2, same=False)
        seen |= read(iter(other), 1)
        taken_over.append(Position(other).capture())
    last = loader(0, 1, epoch=0, workers=before)
    Position(last).restore(taken_over, 1, same=False)
    rest = {int(number) for batch in last for number in batch}
    assert not seen & rest and seen | rest == set(SAMPLES)


def test_a_loader_whose_batches_cannot_be_counted_is_refused():
    saved = [{"epochs": [2], "state": {"somewhere": 3}}] * 2
    with pytest.raises(ValueError, match="does not say how many batches were read"):
        Position(loader(0, 1)).restore(saved, 1, same=False)


def test_ranks_that_all_read_the_same_go_on_there():
    mine = loader(0, 1, distributed=False)
    read(iter(mine), 3)
    saved = [Position(mine).capture()] * 2
    other = loader(0, 1, distributed=False)
    Position(other).restore(saved, 1, same=False)
    assert read(iter(other), 1) == {6, 7}


def test_positions_that_mean_nothing_for_other_ranks_are_refused():
    saved = []
    for batches in (3, 4):
        mine = loader(0, 1, distributed=False)
        read(iter(mine), batches)
        saved.append(Position(mine).capture())
    with pytest.raises(ValueError, match="positions of the data loader are those of 2 ranks"):
        Position(loader(0, 1, distributed=False)).restore(saved, 1, same=False)


def test_a_loader_without_a_state_has_the_epoch_of_its_sampler_alone():
    sampler = DistributedSampler(SAMPLES, num_replicas=1, rank=0)  # type: ignore[arg-type]
    sampler.set_epoch(3)
    assert Position(DataLoader(SAMPLES, sampler=sampler)).capture() == {"epochs": [3]}  # type: ignore[arg-type]
    assert Position(None).capture() == {}
