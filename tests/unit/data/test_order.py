"""The order of samples and of blends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.blend import LONGEST_PERIOD, Blend, period_counts
from trainer.data.errors import DataError
from trainer.data.order import permute


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_every_sample_comes_once_in_every_epoch(count: int, seed: int, epoch: int) -> None:
    assert sorted(permute(np.arange(count), count, seed, epoch)) == list(range(count))


def test_the_order_is_what_it_always_was() -> None:
    assert permute(np.arange(10), 10, 42, 0).tolist() == [3, 2, 1, 7, 5, 4, 0, 6, 9, 8]
    assert permute(np.array([0, 1, 999_999_999_999]), 10**12, 2**63 - 1, 7).tolist() == [418195017988, 828615997097, 299205719701]


def test_an_index_goes_to_the_same_place_whoever_asks_with_it() -> None:
    whole = permute(np.arange(1000), 1000, 3, 1)
    for first in range(0, 1000, 97):
        part = np.arange(first, min(first + 97, 1000))
        assert permute(part, 1000, 3, 1).tolist() == whole[part].tolist()
    assert permute(np.array([], np.int64), 1000, 3, 1).tolist() == []


def test_epochs_and_seeds_have_orders_of_their_own_and_none_is_near_the_identity() -> None:
    count = 4096
    orders = [permute(np.arange(count), count, seed, epoch) for seed in range(4) for epoch in range(4)]
    for number, one in enumerate([np.arange(count), *orders]):
        for other in orders[number:]:
            if one is not other:
                assert (one == other).sum() < 20  # one is expected
    neighbours = np.mean([np.abs(np.diff(order)).mean() for order in orders]) / count
    assert 0.3 < neighbours < 0.37  # a third, when places are independent


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_a_blend_is_never_far_from_its_weights(weights: list[float]) -> None:
    blend = Blend(weights)
    which, _ = blend.locate(np.arange(2 * blend.period))
    taken = np.cumsum(which[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, len(which) + 1)[:, None] * blend.counts / blend.period
    assert np.abs(taken - wanted).max() < len(weights)
    assert np.abs(blend.counts / blend.period - np.array(weights) / sum(weights)).max() < 2 * len(weights) / LONGEST_PERIOD


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_blend_reads_each_dataset_from_the_first_sample_on_without_a_gap(weights: list[int]) -> None:
    which, nth = Blend(weights).locate(np.arange(200))
    for number in range(len(weights)):
        assert nth[which == number].tolist() == list(range((which == number).sum()))


def test_the_place_in_a_blend_is_a_function_of_the_number_alone() -> None:
    blend = Blend([0.5, 0.3, 0.2])
    numbers = np.array([10**12 + 7, 3, 3, 10**12 + 7])
    which, nth = blend.locate(numbers)
    assert which[0] == which[3] and nth[0] == nth[3] and which[1] == which[2] and nth[1] == nth[2]
    assert blend.locate(np.arange(10))[0].tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]


def test_weights_have_the_shortest_exact_period() -> None:
    assert period_counts([1]) == [1]
    assert period_counts([0.7, 0.3]) == [7, 3]
    assert period_counts([2, 2, 4]) == [1, 1, 2]


def test_a_weight_too_small_for_the_period_still_counts() -> None:
    assert period_counts([1, 1e-9])[1] == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused(weight: float) -> None:
    with pytest.raises(DataError, match="a weight is a positive number"):
        Blend([1.0, weight])
