"""Batches read ahead: the same ones in the same order, while the step runs, and none left over."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from bad_batches import broken, leaving_out, outcomes
from trainer_ranks import run_ranks, train, trained, write_config

from resilient import worker
from trainer.ahead import Ahead
from trainer.data.errors import DataError
from trainer.data.samples import Samples

PATIENCE_S = 60


class Storage:
    """Reads what it is asked for once it may; keeps who asked."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.asked: list[tuple[int, int, str]] = []

    def read(self, first: int, size: int) -> str:
        self.asked.append((first, size, threading.current_thread().name))
        if threading.current_thread() is not threading.main_thread():
            assert self.may_read.wait(PATIENCE_S)
        return f"{first}+{size}"


def test_the_next_batch_is_read_by_another_thread_while_the_step_runs():
    storage = Storage()
    ahead = Ahead(storage.read)
    assert ahead.take(0, 4) == "0+4"
    ahead.begin(4, 4)
    storage.may_read.set()  # which the training thread comes to only if it does not wait
    assert ahead.take(4, 4) == "4+4"
    assert storage.asked == [(0, 4, "MainThread"), (4, 4, "next-batch")]


def test_what_was_read_ahead_for_another_step_is_thrown_away():
    storage = Storage()
    storage.may_read.set()
    ahead = Ahead(storage.read)
    ahead.begin(4, 4)
    assert ahead.take(8, 2) == "8+2"
    ahead.begin(10, 2)
    ahead.begin(12, 2)
    assert ahead.take(12, 2) == "12+2"
    assert ahead.take(4, 4) == "4+4"  # nothing is left of the first one
    assert storage.asked[-1] == (4, 4, "MainThread")


def test_what_reading_raises_is_raised_where_the_batch_is_taken_and_nowhere_else():
    def read(first: int, size: int) -> str:
        raise DataError(f"no sample {first}")

    ahead = Ahead(read)
    ahead.begin(4, 4)
    ahead.begin(8, 4)
    with pytest.raises(DataError, match="no sample 8"):
        ahead.take(8, 4)


def test_closing_waits_for_the_read_and_not_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch):
    storage = Storage()
    ahead = Ahead(storage.read)
    ahead.begin(0, 4)
    reading = next(each for each in threading.enumerate() if each.name == "next-batch")
    monkeypatch.setattr("trainer.ahead.LAST_WAIT_S", 0.01)
    ahead.close()
    assert reading.is_alive() and reading.daemon
    storage.may_read.set()
    reading.join(PATIENCE_S)
    ahead.close()
    assert not reading.is_alive()


# -- in training ---------------------------------------------------------------------------------------------------------


def reads(config: Path, run: Callable[..., Any], *args: Any) -> tuple[list[dict[str, Any]], list[tuple[int, str]], list[str]]:
    """Train on this rank: what it told, first samples read and by which thread, and the threads that are left of it."""
    whole, seen = Samples.get, []

    def get(self: Samples, numbers: np.ndarray) -> np.ndarray:
        seen.append((int(numbers[0]), threading.current_thread().name))
        return whole(self, numbers)

    with mock.patch.object(Samples, "get", get), mock.patch("trainer.ahead.LAST_WAIT_S", PATIENCE_S):
        told = run(config, *args)
    return told, seen, [each.name for each in threading.enumerate() if each.name == "next-batch"]


def test_all_batches_but_the_first_are_read_ahead_and_none_behind_the_last_step(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset, train={"steps": 4, "eval_interval": 0})
    told, seen, left = run_ranks(1, reads, config, train)[0]
    assert [first for first, name in seen if name == "next-batch"] == [12, 24, 36]
    assert not left
    stopped, seen, left = run_ranks(1, reads, write_config(tmp_path / "stopped", dataset), train, (), 2)[0]
    assert outcomes(stopped) == outcomes(told)[:2]
    assert [first for first, name in seen if name == "next-batch"] == [12, 24]  # the last one for nothing
    assert not left


def test_of_a_batch_that_is_computed_again_or_left_out_nothing_else_is_taken(dataset: Path, tmp_path: Path):
    plain = outcomes(trained(write_config(tmp_path / "plain", dataset, train={"steps": 5}), 1))
    config = write_config(tmp_path / "again", dataset, train={"steps": 5})
    told, seen, left = run_ranks(1, reads, config, broken, {3: 1})[0]
    assert outcomes(told) == plain and not left
    assert [first for first, _ in seen].count(24) == 2  # read again, since memory may be what was at fault
    config = write_config(tmp_path / "left-out", dataset, train={"steps": 5})
    told, seen, left = run_ranks(1, reads, config, leaving_out, 2, 3)[0]
    assert [line[2] for line in outcomes(told)] == [None, "rolled_back", "rolled_back", None, None] and not left
    assert outcomes(told)[:1] == plain[:1] and outcomes(told)[3:] != plain[3:]


def slow_disk(config: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Train on this rank with a disk that gives the second batch only once the training thread has come to ask for it.

    Returns what it told, and the phase in which the training thread was then.
    """
    whole, phase, seen = Samples.get, worker.phase, []
    asked = threading.Event()
    entered: list[str] = []

    def get(self: Samples, numbers: np.ndarray) -> np.ndarray:
        if int(numbers[0]) == 12:
            assert asked.wait(PATIENCE_S)
            seen.append(entered[-1])
        return whole(self, numbers)

    def entering(name: str) -> Any:
        entered.append(name)
        if entered.count("data") == 2:
            asked.set()
        return phase(name)

    with mock.patch.object(Samples, "get", get), mock.patch.object(worker, "phase", entering):
        return train(config), seen


def test_a_slow_disk_is_waited_for_in_the_phase_by_which_slow_storage_is_found(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset, train={"steps": 3, "eval_interval": 0})
    told, seen = run_ranks(1, slow_disk, config)[0]
    assert len(outcomes(told)) == 3
    assert seen == ["data"]


def spoilt_data(config: Path) -> list[dict[str, Any]]:
    """Train on this rank; the third batch has a token that is none."""
    whole = Samples.get

    def get(self: Samples, numbers: np.ndarray) -> np.ndarray:
        if int(numbers[0]) == 24:
            raise DataError("token 99 is not of the vocabulary")
        return whole(self, numbers)

    with mock.patch.object(Samples, "get", get):
        return train(config)


def test_bad_data_that_was_read_ahead_ends_the_training_as_it_does_otherwise(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset, train={"steps": 4, "eval_interval": 0})
    (error,) = run_ranks(1, spoilt_data, config)
    assert isinstance(error, worker.ConfigError)
    assert "token 99" in str(error)
