"""Optimizer steps of a script that says nothing, as its region tells of them; real optimizers and states."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from watched_rank import Time, Watched

from resilient.script.progress import LINES_S


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
        left = [dict(record.fields) for record in watched.agent.unreported()]
        told = [number for line in lines + left for number in range(line["step"] - line.get("steps", 1) + 1, line["step"] + 1)]
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


def test_a_script_that_asks_by_itself_is_not_stopped_for_it(watched: Watched):
    optimizer = watched.optimizer()
    watched.step(optimizer)
    assert watched.progress.boundary() == 1
    watched.agent.propose(-1, "SIGTERM")
    watched.agent.arm(2)
    watched.step(optimizer, optimizer)
    watched.model(torch.ones(4))


def test_the_end_of_a_script_of_which_only_collectives_are_seen_ends_the_wait_for_them(watched: Watched):
    watched.region.observe(True)
    watched.progress.over()
    assert not watched.agent.activity().observed
    assert not watched.progress.is_silent(), "its collectives are not looked at any more"


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
