"""Splits, windows, and the stream of samples."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import DataError, Samples, open_split
from trainer.data.indexed import IndexedWriter
from trainer.data.samples import SPLITS, Windows
from trainer.data.split import split_tokens

SHARES = (949, 50, 1)


def dataset(prefix: Path, lengths: list[int], first: int = 0) -> Path:
    """Documents of these lengths; every token is its own place, so that a window says where it is from."""
    with IndexedWriter(prefix, np.dtype("<i4")) as writer:
        for length in lengths:
            writer.add(np.arange(first, first + length, dtype="<i4"))
            first += length
        writer.commit()
    return prefix


def every(samples: Samples) -> Windows:
    return samples.get(np.arange(len(samples)))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return dataset(tmp_path / "d", [37 + 13 * (number % 7) for number in range(100)])


def test_a_window_is_consecutive_tokens_and_overlaps_the_next_by_one(prefix: Path) -> None:
    windows = every(open_split([(prefix, 1.0)], (1, 0, 0), "train", 16, 1))
    assert windows.shape[1] == 17 and windows.dtype == np.int64
    assert (np.diff(windows) == 1).all()
    starts = sorted(windows[:, 0])
    assert starts == list(range(0, 16 * len(starts), 16))
    total = 100 * 37 + 13 * sum(number % 7 for number in range(100))
    assert len(starts) == (total - 1) // 16


@pytest.mark.parametrize(("tokens", "count"), [(17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
def test_an_epoch_has_as_many_samples_as_have_a_next_token_for_every_token(tmp_path: Path, tokens: int, count: int) -> None:
    samples = open_split([(dataset(tmp_path / "d", [tokens]), 1.0)], (1, 0, 0), "train", 16, 1)
    assert len(samples) == count
    assert every(samples).max() == 16 * count


def test_splits_are_disjoint_and_keep_to_their_shares(prefix: Path) -> None:
    found = [set(every(open_split([(prefix, 1.0)], (6, 3, 1), which, 16, 1)).ravel().tolist()) for which in SPLITS]
    assert not (found[0] & found[1] or found[0] & found[2] or found[1] & found[2])
    total = sum(map(len, found))
    for tokens, share in zip(found, (0.6, 0.3, 0.1), strict=True):
        assert abs(len(tokens) / total - share) < 0.03


def test_the_stream_is_the_same_however_it_is_dealt_to_ranks_and_batches(prefix: Path) -> None:
    samples = open_split([(prefix, 1.0)], SHARES, "train", 16, 7)
    count = 2 * len(samples) + 5
    whole = samples.get(np.arange(count))
    for ranks, micro in ((1, 1), (2, 4), (4, 2), (3, 5)):
        again = open_split([(prefix, 1.0)], SHARES, "train", 16, 7)
        seen: dict[int, list[int]] = {}
        consumed = 0
        while consumed < count:
            for rank in range(ranks):
                numbers = np.arange(consumed + rank * micro, consumed + (rank + 1) * micro)
                seen.update(zip(numbers.tolist(), again.get(numbers).tolist(), strict=True))
            consumed += ranks * micro
        assert [seen[number] for number in range(count)] == whole.tolist()


def test_a_loader_that_starts_in_the_middle_goes_on_as_the_one_before(prefix: Path) -> None:
    first = open_split([(prefix, 1.0)], SHARES, "train", 16, 7).get(np.arange(500))
    later = open_split([(prefix, 1.0)], SHARES, "train", 16, 7).get(np.arange(123, 500))
    assert (first[123:] == later).all()


def test_epochs_hold_the_same_samples_in_other_orders(prefix: Path) -> None:
    samples = open_split([(prefix, 1.0)], (1, 0, 0), "train", 16, 7)
    count = len(samples)
    epochs = [samples.get(np.arange(epoch * count, (epoch + 1) * count))[:, 0].tolist() for epoch in range(3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert samples.get(np.array([10**12])).shape == (1, 17)


def test_another_seed_gives_another_order(prefix: Path) -> None:
    one, two = (every(open_split([(prefix, 1.0)], (1, 0, 0), "train", 16, seed)).tolist() for seed in (1, 2))
    assert one != two and sorted(one) == sorted(two)


def test_no_samples_asked_for_are_no_samples(prefix: Path) -> None:
    assert open_split([(prefix, 1.0)], SHARES, "train", 16, 1).get(np.array([], np.int64)).shape == (0, 17)


def test_a_negative_sample_is_refused(prefix: Path) -> None:
    with pytest.raises(ValueError, match="sample -3"):
        open_split([(prefix, 1.0)], SHARES, "train", 16, 1).get(np.array([0, -3]))


def test_a_blend_reads_its_datasets_in_proportion_and_each_one_whole(tmp_path: Path) -> None:
    small, large = dataset(tmp_path / "s", [161]), dataset(tmp_path / "l", [3201], first=100_000)
    samples = open_split([(small, 1.0), (large, 3.0)], (1, 0, 0), "train", 16, 5)
    assert len(samples) == 10 + 200
    starts = samples.get(np.arange(80))[:, 0]
    of_small = starts[starts < 100_000]
    assert len(of_small) == 20
    assert sorted(of_small[:10]) == sorted(of_small[10:]) == list(range(0, 160, 16))
    assert len(set(starts[starts >= 100_000])) == 60
    assert (samples.get(np.arange(33, 80))[:, 0] == starts[33:]).all()


# -- splits ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=20),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).filter(any),
    st.integers(2, 30),
)
def test_every_share_gets_a_sample_if_there_are_tokens_for_it(lengths: list[int], shares: tuple[int, int, int], need: int) -> None:
    starts = np.concatenate(([0], np.cumsum(lengths)))
    cut = split_tokens(shares, need, len(lengths), lambda document: int(starts[document]))
    wanted = sum(share > 0 for share in shares)
    if cut is None:
        assert starts[-1] < wanted * need
        return
    assert cut[0] == 0 and cut[3] == starts[-1] and list(cut) == sorted(cut)
    for number, share in enumerate(shares):
        tokens = cut[number + 1] - cut[number]
        assert tokens >= need if share else tokens == 0


def test_cuts_fall_between_documents_while_these_allow() -> None:
    starts = [0, 100, 200, 300, 310, 1000]
    assert split_tokens((949, 50, 1), 10, 5, lambda document: starts[document]) == (0, 300, 310, 1000)
    assert split_tokens((1, 1, 0), 10, 5, lambda document: starts[document]) == (0, 310, 1000, 1000)


def test_a_single_document_is_cut_inside() -> None:
    assert split_tokens((949, 50, 1), 10, 1, lambda document: 1000 * document) == (0, 949, 990, 1000)


def test_too_few_tokens_are_an_error_with_both_numbers(tmp_path: Path) -> None:
    dataset(tmp_path / "d", [50, 50])
    with pytest.raises(DataError, match=r"has 100 tokens, and one sample of seq_len 64 for each of 3 splits needs 195"):
        open_split([(tmp_path / "d", 1.0)], SHARES, "train", 64, 1)


def test_a_split_without_a_share_is_refused(prefix: Path) -> None:
    with pytest.raises(DataError, match=r"split \[1, 0, 0\] leaves nothing for valid"):
        open_split([(prefix, 1.0)], (1, 0, 0), "valid", 16, 1)


def test_no_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="no dataset is named"):
        open_split([], SHARES, "train", 16, 1)


@pytest.mark.parametrize("wrong", [1000, -1])
def test_a_token_out_of_the_vocabulary_is_refused_with_its_place(tmp_path: Path, wrong: int) -> None:
    tokens = np.zeros(100, "<i4")
    tokens[70] = wrong
    with IndexedWriter(tmp_path / "d", np.dtype("<i4")) as writer:
        writer.add(tokens)
        writer.commit()
    samples = open_split([(tmp_path / "d", 1.0)], (1, 0, 0), "train", 8, 1, vocab_size=1000)
    with pytest.raises(DataError, match=rf"d\.bin has token {wrong} at place 70, and the vocabulary has only 1,000"):
        every(samples)
    every(open_split([(tmp_path / "d", 1.0)], (1, 0, 0), "train", 8, 1))
