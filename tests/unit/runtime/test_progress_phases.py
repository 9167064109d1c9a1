"""The phases of a script that says nothing: reading a batch, saving, and what an exception leaves of them."""

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from watched_rank import Time, Watched

from resilient.script.files import SavedFile

Save = Callable[[object, Path], None]


@pytest.fixture
def reading(watched: Watched) -> Iterator[None]:
    """Batches are read as a script reads them that is watched."""
    before = _BaseDataLoaderIter.__next__
    _BaseDataLoaderIter.__next__ = watched.progress.reading(before)  # type: ignore[method-assign]
    yield
    _BaseDataLoaderIter.__next__ = before  # type: ignore[method-assign]


@pytest.fixture
def save(watched: Watched) -> Save:
    """`torch.save` as a script calls it that is watched."""
    return watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))


@pytest.mark.usefixtures("reading")
def test_reading_a_batch_is_a_phase_of_its_own(watched: Watched):
    seen: list[str] = []

    class Samples(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            seen.append(watched.agent.activity().phase)
            return index

    optimizer = watched.optimizer()
    watched.step(optimizer)
    for _ in DataLoader(Samples()):
        assert watched.agent.activity().phase == "step"
    assert seen == ["data"] * 3
    assert watched.agent.activity().phase == "step"


class Spoilt(torch.utils.data.Dataset[int]):
    """Five samples, of which the second cannot be read."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        if index == 1:
            raise ValueError("a bad sample")
        return index


def behind_a_bad_sample() -> Iterator[int]:
    """Batches of which the second has just failed."""
    batches = iter(DataLoader(Spoilt()))
    next(batches)
    with pytest.raises(ValueError, match="a bad sample"):
        next(batches)
    return batches


@pytest.mark.usefixtures("reading")
def test_a_bad_sample_that_the_script_leaves_out_leaves_no_phase_behind(watched: Watched, passing: Time):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    batches = behind_a_bad_sample()
    assert watched.agent.activity().phase == "data", "where it failed, if nobody catches it"
    next(batches)
    assert watched.agent.activity().phase == "step", "the script has gone on"
    passing.passes()
    watched.step(optimizer)
    assert watched.region.data_s == 0.0, "no time has passed in the loader"


@pytest.mark.usefixtures("reading")
def test_a_bad_sample_with_which_the_data_end_is_over_with_the_step(watched: Watched, passing: Time):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    behind_a_bad_sample()
    watched.step(optimizer)
    assert watched.agent.activity().phase == "step"
    passing.passes()
    watched.step(optimizer)
    assert watched.region.data_s == 0.0


@pytest.mark.usefixtures("reading")
def test_what_is_saved_while_an_exception_of_the_loader_ends_the_script_hides_nothing(watched: Watched, save: Save, tmp_path: Path):
    watched.step(watched.optimizer())
    behind_a_bad_sample()
    save({}, tmp_path / "as it ends")
    assert watched.agent.activity().phase == "data"


@pytest.mark.parametrize("beats", [False, True], ids=["silent", "beats"])
def test_a_save_that_fails_and_is_caught_is_over_with_the_step(watched: Watched, save: Save, tmp_path: Path, beats: bool):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    if beats:
        watched.progress.stand_back(1)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save({"f": lambda: 1}, tmp_path / "bad")
    assert watched.agent.activity().phase == "snapshot", "where it failed, if nobody catches it"
    watched.step(optimizer)
    if beats:
        watched.progress.stand_back(2)
    assert watched.agent.activity().phase == "step"


def test_a_save_that_is_tried_again_within_another_leaves_no_phase_behind(watched: Watched, save: Save, tmp_path: Path):
    optimizer = watched.optimizer()
    watched.step(optimizer)

    def twice(_: object, path: Path) -> None:
        with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):
            save({"f": lambda: 1}, path)
        save({}, path)

    watched.progress.files._wrapped(twice, lambda args, _: Path(args[1]))({}, tmp_path / "model.pt")
    assert watched.agent.activity().phase == "step"
    watched.step(optimizer)
    assert watched.agent.activity().phase == "step"


@pytest.mark.usefixtures("reading")
def test_a_script_that_tells_its_phases_by_itself_begins_where_no_exception_has_left_it(watched: Watched):
    watched.step(watched.optimizer())
    behind_a_bad_sample()
    watched.progress.leave_phases()
    assert watched.agent.activity().phase == "step"


def test_a_file_of_a_thread_leaves_the_phase_alone(watched: Watched, save: Save, tmp_path: Path):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    entered = watched.agent.activity().phase_t
    thread = threading.Thread(target=save, args=({}, tmp_path / "async"))
    thread.start()
    thread.join()
    assert (watched.agent.activity().phase, watched.agent.activity().phase_t) == ("step", entered)
    assert [type(each) for each in watched.progress.files.take()] == [SavedFile]
