"""Samples in an order that is a pure function of seed, epoch and index."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.errors import DataError
from trainer.data.indexed import IndexedWriter
from trainer.data.order import PERIOD, blend_period, permute
from trainer.data.samples import open_split, split_boundaries

PINNED_0 = [3, 2, 1, 7, 5, 4, 0, 6]
PINNED_1 = [6, 2, 3, 9, 5, 7, 1, 8]


def dataset(prefix: Path, documents: int, length: int, first: int = 0) -> Path:
    """Documents of consecutive numbers, so that a token says where it stood."""
    with IndexedWriter(prefix, np.int32) as writer:
        for number in range(documents):
            writer.add(np.arange(length) + first + number * length)
    return prefix


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_the_order_of_an_epoch_visits_everything_once(count, seed, epoch):
    assert sorted(permute(np.arange(count), count, seed, epoch)) == list(range(count))


def test_the_order_is_pinned():
    assert permute(np.arange(8), 10, 42, 0).tolist() == PINNED_0
    assert permute(np.arange(8), 10, 42, 1).tolist() == PINNED_1


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(permute(np.arange(100), 100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_neighbours_are_torn_apart():
    order = permute(np.arange(1000), 1000, 1, 0)
    assert (np.abs(np.diff(order)) <= 1).sum() < 20
    assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.1


def test_a_sample_is_a_window_with_the_next_token(tmp_path: Path):
    samples = open_split([(dataset(tmp_path / "d", 10, 100), 1.0)], (1, 0, 0), "train", 16, 5)
    assert len(samples) == 999 // 16
    windows = samples.get(np.arange(len(samples)))
    assert (np.diff(windows, axis=1) == 1).all()
    assert sorted(windows[:, 0]) == [16 * number for number in range(len(samples))]


def test_the_stream_is_the_same_however_it_is_cut_and_in_every_epoch_another(tmp_path: Path):
    samples = open_split([(dataset(tmp_path / "d", 10, 100), 1.0)], (1, 0, 0), "train", 16, 5)
    whole = samples.get(np.arange(200))
    for size in (1, 7, 64):
        parts = [samples.get(np.arange(start, min(start + size, 200))) for start in range(0, 200, size)]
        assert np.array_equal(np.concatenate(parts), whole)
    ranks = [samples.get(np.arange(rank, 200, 4)) for rank in range(4)]
    assert all(np.array_equal(part, whole[rank::4]) for rank, part in enumerate(ranks))
    count = len(samples)
    first, second = whole[:count, 0].tolist(), whole[count : 2 * count, 0].tolist()
    assert first != second
    assert sorted(first) == sorted(second)


def test_splits_share_no_token_and_leave_none_out(tmp_path: Path):
    prefix = dataset(tmp_path / "d", 200, 50)
    seen = []
    for which in ("train", "valid", "test"):
        samples = open_split([(prefix, 1.0)], (949, 50, 1), which, 7, 1)
        windows = samples.get(np.arange(len(samples)))
        seen.append(set(windows[:, :-1].flatten().tolist()))
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]
    assert max(seen[0]) < min(seen[1]) < max(seen[1]) < min(seen[2])


@settings(max_examples=80, deadline=None)
@given(
    documents=st.integers(0, 500),
    shares=st.tuples(st.integers(1, 1000), st.integers(0, 100), st.integers(0, 100)),
)
def test_every_split_that_is_wanted_gets_a_document_where_there_are_enough(documents, shares):
    bounds = split_boundaries(documents, shares)
    assert bounds[0] == 0
    assert bounds[-1] == documents
    assert bounds == sorted(bounds)
    if documents >= sum(share > 0 for share in shares):
        for number, share in enumerate(shares):
            assert (bounds[number + 1] > bounds[number]) == (share > 0) or share > 0 == bounds[number]


def test_a_split_without_a_sample_says_how_much_there_is_and_needs_to_be(tmp_path: Path):
    prefix = dataset(tmp_path / "d", 3, 10)
    with pytest.raises(DataError, match=r"has 10 tokens in 1 documents for the valid split, and one sample needs 17"):
        open_split([(prefix, 1.0)], (1, 1, 1), "valid", 16, 1)


def test_a_blend_keeps_to_its_weights_everywhere():
    period = blend_period([3, 1])
    taken = np.cumsum(period == 0)
    assert (np.abs(taken - 0.75 * np.arange(1, PERIOD + 1)) <= 1).all()


def test_a_blend_reads_each_dataset_in_its_own_order_and_misses_nothing(tmp_path: Path):
    parts = [(dataset(tmp_path / "a", 10, 100), 1.0), (dataset(tmp_path / "b", 10, 100, first=10_000), 3.0)]
    samples = open_split(parts, (1, 0, 0), "train", 16, 5)
    windows = samples.get(np.arange(2 * PERIOD))
    from_b = windows[:, 0] >= 10_000
    assert from_b.mean() == 0.75
    alone = open_split(parts[:1], (1, 0, 0), "train", 16, 5)
    assert np.array_equal(windows[~from_b], alone.get(np.arange((~from_b).sum())))
    assert np.array_equal(samples.get(np.arange(PERIOD - 3, PERIOD + 3)), windows[PERIOD - 3 : PERIOD + 3])
