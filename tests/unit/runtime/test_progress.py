"""Optimizer steps of a script that says nothing, as its region tells of them; real optimizers, loaders and files."""

import contextlib
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from resilient.heartbeat_region import AgentRegion, WorkerRegion
from resilient.progress import LINES_S, Progress, Stopped
from resilient.script_files import SavedFile


class Watched:
    """A rank that is watched, from the agent's side and from its own."""

    def __init__(self, path: Path, **more: Any) -> None:
        self.agent = AgentRegion(path)
        self.region = WorkerRegion(path)
        self.progress = Progress(self.region, **{"first_rank": True, "on_stop": "raise", **more})
        self.model = torch.nn.Linear(4, 4)

    def optimizer(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
        made = kind(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        made.register_step_post_hook(self.progress.after_step)
        return made

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            self.model(torch.ones(4)).sum().backward()
            optimizer.step()

    def told(self, event: str | None) -> list[dict[str, Any]]:
        return [dict(record.fields) for record in self.agent.drain() if record.event == event]


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = time.time()

    def passes(self) -> None:
        """So much that the next step has a line of its own."""
        self.now += LINES_S + 0.1


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr("resilient.clock.now", lambda: made.now)
    return made


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "region")
    yield made
    for handle in made.progress._handles:
        handle.remove()
    made.agent.close()


def test_each_optimizer_step_is_a_beat(watched: Watched):
    optimizer = watched.optimizer()
    assert watched.agent.activity().step == -1
    for step in (1, 2, 3):
        watched.step(optimizer)
        seen = watched.agent.activity()
        assert (seen.step, seen.phase, seen.observed) == (step, "step", True)


def test_the_first_step_of_a_script_without_a_loader_has_no_time_of_its_own(watched: Watched, passing: Time):
    optimizer = watched.optimizer()
    for _ in range(4):
        watched.step(optimizer)
        passing.passes()
    lines = watched.told(None)
    assert [line["step"] for line in lines] == [2, 3, 4] and [line.get("steps", 1) for line in lines] == [2, 1, 1]
    assert all(line["step_s"] == pytest.approx(LINES_S + 0.1) for line in lines)
    assert [line["steps_per_s"] * (LINES_S + 0.1) for line in lines] == pytest.approx([1, 1, 1])


def test_optimizers_that_take_turns_count_once_for_each_iteration(watched: Watched):
    one, other = watched.optimizer(), watched.optimizer(torch.optim.SGD)
    watched.step(one, other, one, other)
    assert watched.agent.activity().step == 2


def test_the_one_that_steps_more_often_is_counted(watched: Watched):
    seldom, often = watched.optimizer(), watched.optimizer(torch.optim.SGD)
    for _ in range(3):
        watched.step(seldom, often, often, often)
    assert watched.agent.activity().step >= 9


def test_an_optimizer_that_takes_the_place_of_another_goes_on_counting(watched: Watched):
    first = watched.optimizer()
    for _ in range(5):
        watched.step(first)
    second = watched.optimizer()
    for _ in range(3):
        watched.step(second)
    assert watched.agent.activity().step in (7, 8)


def test_micro_batches_are_no_steps(watched: Watched):
    optimizer = watched.optimizer()
    for _ in range(4):
        watched.model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert watched.agent.activity().step == 1


def test_a_script_that_resumes_goes_on_from_the_step_of_its_optimizer(watched: Watched):
    before = torch.optim.AdamW(watched.model.parameters())
    for _ in range(40):
        watched.step(before)
    optimizer = watched.optimizer()
    optimizer.load_state_dict(before.state_dict())
    watched.step(optimizer)
    assert watched.agent.activity().step == 41
    assert watched.told("resumed") == [{"step": 40, "tier": "script"}]


def test_a_fused_step_that_the_gradient_scaler_has_left_out_says_the_same_of_the_start(watched: Watched):
    optimizer = watched.optimizer()
    watched.step(optimizer)  # makes state
    watched.progress.count = 1
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    assert watched.progress._went_on_from(optimizer) == 1


def test_a_script_that_will_speak_may_try_its_first_step_again_before_it_does(watched: Watched):
    optimizer: Any = torch.optim.AdamW(watched.model.parameters(), fused=True)
    optimizer.register_step_post_hook(watched.progress.after_step)
    watched.progress.expect_words()
    optimizer.found_inf = torch.tensor(1.0)
    watched.step(optimizer, optimizer)
    optimizer.found_inf = torch.tensor(0.0)
    watched.step(optimizer)
    assert watched.agent.activity().step == -1
    watched.progress.stand_back(1)
    assert watched.told("resumed") == []


@pytest.mark.parametrize(("loaded", "momentum", "first"), [(True, 0.9, 41), (False, 0.9, 1), (True, 0.0, 41), (False, 0.0, 1)])
def test_a_state_without_a_number_is_that_of_the_newest_checkpoint_if_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: bool, momentum: float, first: int
):
    watched = Watched(tmp_path / "region", saved_step=40)
    loading = watched.progress.loading(torch.optim.Optimizer.load_state_dict)
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", loading)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(watched.model.parameters(), 0.1, momentum=momentum)

    before = optimizer()
    watched.step(before)
    after = optimizer()
    get_state_dict(watched.model, after)  # as a script does that saves what it begins with: it says nothing of a load
    if loaded:
        after.load_state_dict(before.state_dict())
    watched.progress.first_step = after.register_step_pre_hook(watched.progress.before_first_step)
    after.register_step_post_hook(watched.progress.after_step)
    watched.step(after, after)
    assert watched.agent.activity().step == first + 1
    (resumed,) = watched.told("resumed")
    assert resumed["step"] == first - 1
    watched.agent.close()


def test_a_step_that_only_makes_a_state_to_load_into_is_none(watched: Watched):
    optimizer = watched.optimizer()
    get_state_dict(watched.model, optimizer)
    assert optimizer.state, "torch has taken a step"
    assert watched.progress.count == 0
    watched.step(optimizer)
    assert watched.agent.activity().step == 1


@pytest.mark.parametrize("counted", [False, True], ids=["saved without that step", "saved with it"])
def test_a_step_that_makes_a_state_to_load_into_is_none_after_the_load_either(tmp_path: Path, counted: bool):
    """`torch.distributed.checkpoint` loads into a state that a step has made; the script may have made one before it saved, too."""
    watched = Watched(tmp_path / "region", saved_step=40)
    optimizer = torch.optim.AdamW(watched.model.parameters(), lr=0.1)
    watched.progress.first_step = optimizer.register_step_pre_hook(watched.progress.before_first_step)
    optimizer.register_step_post_hook(watched.progress.after_step)
    get_state_dict(watched.model, optimizer)
    for state in optimizer.state.values():
        state["step"].fill_(41.0 if counted else 40.0)
    watched.step(optimizer, optimizer)
    assert watched.agent.activity().step == 42
    (resumed,) = watched.told("resumed")
    assert resumed["step"] == 40
    watched.agent.close()


def test_what_the_script_says_itself_wins(watched: Watched):
    optimizer = watched.optimizer()
    watched.progress.expect_words()
    watched.step(optimizer)
    assert watched.agent.activity().step == -1, "it has said that it will speak"
    watched.progress.stand_back(1)
    watched.step(optimizer, optimizer)
    assert (watched.agent.activity().step, watched.agent.activity().observed) == (-1, False)


def test_steps_of_a_script_that_beats_are_told_by_its_beats(watched: Watched, passing: Time):
    optimizer = watched.optimizer()
    watched.progress.expect_words()
    for step in range(41, 45):
        watched.step(optimizer)
        watched.progress.stand_back(step)
        passing.passes()
    lines = watched.told(None)
    assert [(line["step"], line.get("steps", 1)) for line in lines] == [(42, 2), (43, 1), (44, 1)]
    assert all(line["step_s"] == pytest.approx(LINES_S + 0.1) for line in lines)
    assert [line["steps_per_s"] * (LINES_S + 0.1) for line in lines] == pytest.approx([1, 1, 1])


def test_short_steps_of_a_script_that_beats_are_told_together_and_the_last_at_its_end(watched: Watched):
    for step in range(1, 2001):
        watched.progress.stand_back(step)
    watched.progress.ends()
    lines = watched.told(None)
    assert len(lines) < 200 and lines[-1]["step"] == 2000
    assert sum(line.get("steps", 1) for line in lines) == 2000


@pytest.mark.parametrize("beats", [True, False], ids=["beats", "silent"])
def test_whenever_a_worker_is_killed_each_step_is_told_once(watched: Watched, beats: bool):
    optimizer = watched.optimizer()
    lines: list[dict[str, Any]] = []
    for step in range(1, 301):
        if beats:
            watched.region.beat(step)
            watched.progress.stand_back(step)
        else:
            watched.step(optimizer)
        lines += watched.told(None)
        untold = [dict(record.fields) for record in watched.agent.untold()]
        told = [number for line in lines + untold for number in range(line["step"] - line.get("steps", 1) + 1, line["step"] + 1)]
        assert told == list(range(1, step + 1))


def test_a_script_that_reports_metrics_has_no_lines_of_its_beats(watched: Watched, passing: Time):
    for step in range(1, 4):
        watched.progress.stand_back(step)
        watched.progress.leave_lines()
        passing.passes()
    watched.progress.ends()
    assert watched.told(None) == []


def test_a_script_whose_beats_go_back_is_told_from_there_on(watched: Watched, passing: Time):
    for step in (7, 8, 3, 4):
        watched.progress.stand_back(step)
        passing.passes()
    assert [line["step"] for line in watched.told(None)] == [8, 4]


def test_a_script_that_only_asks_who_it_is_is_watched_from_its_second_step(watched: Watched):
    optimizer = watched.optimizer()
    watched.progress.expect_words()
    watched.step(optimizer, optimizer)
    assert watched.agent.activity().step == 2
    assert watched.told("resumed") == [{"step": 0, "tier": "script"}]


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
    before = _BaseDataLoaderIter.__next__
    _BaseDataLoaderIter.__next__ = watched.progress.reading(before)  # type: ignore[method-assign]
    try:
        for _ in DataLoader(Samples()):
            assert watched.agent.activity().phase == "step"
    finally:
        _BaseDataLoaderIter.__next__ = before  # type: ignore[method-assign]
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


@pytest.fixture
def reading(watched: Watched) -> Iterator[None]:
    """Batches are read as a script reads them that is watched."""
    before = _BaseDataLoaderIter.__next__
    _BaseDataLoaderIter.__next__ = watched.progress.reading(before)  # type: ignore[method-assign]
    yield
    _BaseDataLoaderIter.__next__ = before  # type: ignore[method-assign]


@pytest.mark.usefixtures("reading")
def test_a_bad_sample_that_the_script_leaves_out_leaves_no_phase_behind(watched: Watched, passing: Time):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    batches = iter(DataLoader(Spoilt()))
    next(batches)
    with pytest.raises(ValueError, match="a bad sample"):
        next(batches)
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
    batches = iter(DataLoader(Spoilt()))
    next(batches)
    with pytest.raises(ValueError, match="a bad sample"):
        next(batches)
    watched.step(optimizer)
    assert watched.agent.activity().phase == "step"
    passing.passes()
    watched.step(optimizer)
    assert watched.region.data_s == 0.0


@pytest.mark.usefixtures("reading")
def test_what_is_saved_while_an_exception_of_the_loader_ends_the_script_hides_nothing(watched: Watched, tmp_path: Path):
    watched.step(watched.optimizer())
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    batches = iter(DataLoader(Spoilt()))
    next(batches)
    with pytest.raises(ValueError, match="a bad sample"):
        next(batches)
    save({}, tmp_path / "as it ends")
    assert watched.agent.activity().phase == "data"


@pytest.mark.parametrize("beats", [False, True], ids=["silent", "beats"])
def test_a_save_that_fails_and_is_caught_is_over_with_the_step(watched: Watched, tmp_path: Path, beats: bool):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    if beats:
        watched.progress.stand_back(1)
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save({"f": lambda: 1}, tmp_path / "bad")
    assert watched.agent.activity().phase == "snapshot", "where it failed, if nobody catches it"
    watched.step(optimizer)
    if beats:
        watched.progress.stand_back(2)
    assert watched.agent.activity().phase == "step"


def test_a_save_that_is_tried_again_within_another_leaves_no_phase_behind(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))

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
    batches = iter(DataLoader(Spoilt()))
    next(batches)
    with pytest.raises(ValueError, match="a bad sample"):
        next(batches)
    watched.progress.leave_phases()
    assert watched.agent.activity().phase == "step"


def test_a_checkpoint_of_its_own_is_told_once_the_script_has_gone_on(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    save({"early": 1}, tmp_path / "arguments.pt")
    watched.step(optimizer, optimizer)
    save(watched.model.state_dict(), tmp_path / "partial")
    (tmp_path / "partial").rename(tmp_path / "model.pt")
    assert watched.told("script_checkpoint") == []
    watched.step(optimizer)
    (told,) = watched.told("script_checkpoint")
    assert (told["step"], told["path"], told["files"]) == (2, str(tmp_path / "model.pt"), 1)
    assert told["bytes"] == (tmp_path / "model.pt").stat().st_size


def test_checkpoints_are_told_of_a_script_that_has_no_optimizer(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    now = time.time()
    monkeypatch.setattr("resilient.clock.now", lambda: now)
    for seconds, name in ((0.0, "arguments"), (5.0, "vocabulary"), (100.0, "first"), (100.5, "its other half"), (200.0, "second")):
        monkeypatch.setattr("resilient.clock.now", lambda t=now + seconds: t)
        save({}, tmp_path / name)
    told = watched.told("script_checkpoint")
    assert [(each["step"], each["files"]) for each in told] == [(0, 2)], "what it starts with is none, and the last one is not over"
    watched.progress.ends()
    assert [each["path"] for each in watched.told("script_checkpoint")] == [str(tmp_path / "second")]


def test_what_was_written_before_a_save_that_failed_is_no_part_of_the_next_checkpoint(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    began = time.time()
    for seconds, name in ((100.0, "half"), (100.5, "nowhere/its other half"), (200.0, "second"), (300.0, "third")):
        monkeypatch.setattr("resilient.clock.now", lambda t=began + seconds: t)
        with contextlib.suppress(RuntimeError):
            save({}, tmp_path / name)
    assert [each["path"] for each in watched.told("script_checkpoint")] == [str(tmp_path / "second")]


def test_a_checkpoint_is_told_by_the_name_that_its_folder_has_then(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    watched.step(optimizer)
    (tmp_path / "partial").mkdir()
    for name in ("model.pt", "optimizer.pt"):
        save({}, tmp_path / "partial" / name)
    (tmp_path / "partial").rename(tmp_path / "step-1")
    watched.step(optimizer)
    assert [each["path"] for each in watched.told("script_checkpoint")] == [str(tmp_path / "step-1")]


def test_a_checkpoint_is_told_although_something_beside_it_is_gone_once_it_is_listed(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()

    def written(_: object, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(100))
        (folder / "rng-1.tmp").symlink_to("gone")  # listed, and not there: another rank has renamed its file meanwhile

    save = watched.progress.files._wrapped(written, lambda args, _: Path(args[1]))
    watched.step(optimizer)
    save({}, tmp_path / "step-1")
    watched.step(optimizer)
    assert [(each["path"], each["bytes"]) for each in watched.told("script_checkpoint")] == [(str(tmp_path / "step-1"), 100)]


def test_a_checkpoint_that_could_not_be_finished_is_none(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    watched.step(optimizer)
    save({}, tmp_path / "one")
    with pytest.raises(RuntimeError):
        save({}, tmp_path / "nowhere/two")
    assert watched.agent.activity().phase == "snapshot"
    watched.progress.ends()
    assert watched.told("script_checkpoint") == []


def test_a_file_of_a_thread_leaves_the_phase_alone(watched: Watched, tmp_path: Path):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    save = watched.progress.files._wrapped(torch.save, lambda args, _: Path(args[1]))
    entered = watched.agent.activity().phase_t
    thread = threading.Thread(target=save, args=({}, tmp_path / "async"))
    thread.start()
    thread.join()
    assert (watched.agent.activity().phase, watched.agent.activity().phase_t) == ("step", entered)
    assert [type(each) for each in watched.progress.files.take()] == [SavedFile]


def test_a_stop_lets_the_step_end_and_raises_before_the_next(watched: Watched):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    watched.agent.propose(-1, "SIGTERM")
    watched.agent.arm(2)
    watched.step(optimizer)
    assert watched.agent.activity().stopped
    with pytest.raises(Stopped) as stop:
        watched.model(torch.ones(4))
    assert stop.value.code == 0


def test_a_script_that_asks_by_itself_is_not_stopped_for_it(watched: Watched):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    assert watched.progress.boundary() == 1
    watched.agent.propose(-1, "SIGTERM")
    watched.agent.arm(2)
    watched.step(optimizer, optimizer)
    watched.model(torch.ones(4))


def test_a_step_costs_less_than_five_microseconds(watched: Watched):
    """Of processor time, at best of many: what else the machine does is not to be measured."""
    watched.progress._first_rank = watched.progress._lines = False
    watched.step(optimizer := watched.optimizer())
    best = float("inf")
    for _ in range(50):
        began = time.thread_time_ns()
        for _ in range(200):
            watched.progress.after_step(optimizer)
        best = min(best, (time.thread_time_ns() - began) / 200)
    assert best < 5000
