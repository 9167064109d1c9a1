"""What happens in a step beside the passes: bad batches, ramp-up, documents, the optimizers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from bad_batches import broken, leaving_out, outcomes
from hypothesis import given
from hypothesis import strategies as st
from soak import soaked
from torch import nn
from trainer_ranks import run_ranks, train, trained, write_config

from resilient.worker import Config
from trainer.adan import Adan
from trainer.batches import Batches
from trainer.guard import judge, limits

NAN = math.nan
FLAT = [2.0, 2.1] * 4


# -- the guard -----------------------------------------------------------------------------------------------------------

TABLE: list[tuple[float, float, list[float], str | None]] = [
    (2.0, 1.0, [], None),
    (NAN, 1.0, [], "not_finite"),
    (2.0, math.inf, [], "not_finite"),
    (9.0, 1.0, FLAT, "loss_spike"),
    (2.3, 1.0, FLAT, None),
    (9.0, 1.0, FLAT[:7], None),  # too few to tell
    (0.1, 1.0, FLAT, None),  # a fall is no spike
    (2.0001, 1.0, [2.0] * 8, "loss_spike"),  # nothing ever varied
]


@pytest.mark.parametrize(("loss", "norm", "history", "kind"), TABLE)
def test_the_guard(loss, norm, history, kind):
    found = judge(loss, norm, limits(history, not_finite=True, spike=6.0, window=8))
    assert (found.kind if found else None) == kind


def test_the_guard_can_be_switched_off():
    assert judge(NAN, NAN, limits([], not_finite=False, spike=None, window=8)) is None


def ledger(told: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (line["event"], line.get("kind") or line.get("name"), line.get("step"))
        for line in told
        if line["event"] in ("fault", "action")
    ]


@pytest.mark.parametrize("ranks", [2, soaked(1)])
def test_a_gradient_that_is_no_number_once_costs_a_second_pass_and_nothing_else(dataset: Path, tmp_path: Path, ranks: int):
    dropout = {"model": {"layers": 2, "hidden": 32, "heads": 4, "seq_len": 16, "dropout": 0.1}}
    config = write_config(tmp_path / "a", dataset, **dropout)
    told = run_ranks(ranks, broken, config, {3: 1})[0]
    assert ledger(told) == [("fault", "not_finite", 3), ("action", "recompute_batch", None)]
    assert outcomes(told) == outcomes(trained(write_config(tmp_path / "b", dataset, **dropout), ranks))


def test_a_batch_that_is_bad_again_is_skipped_by_all_ranks_alike(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset)
    told = run_ranks(2, broken, config, {3: 2})
    assert [kind for _, kind, _ in ledger(told[0])] == ["not_finite", "recompute_batch", "not_finite", "skip_batch"]
    (skip,) = [line for line in told[0] if line.get("name") == "skip_batch"]
    assert (skip["step"], skip["in_a_row"]) == (3, 1)
    assert [line[2] for line in outcomes(told[0])] == [None, None, "not_finite", *[None] * 5]
    assert all(math.isfinite(line[1]) for line in outcomes(told[0]) if line[2] is None)


def test_too_many_bad_batches_in_a_row_end_the_attempt(dataset: Path, tmp_path: Path):
    config = write_config(tmp_path, dataset, train={"guard": {"max_skips": 2}})
    found = run_ranks(2, broken, config, dict.fromkeys(range(3, 9), 2))
    assert [type(error).__name__ for error in found] == ["BadBatch"] * 2
    assert "3 batches in a row are bad, the last one at step 5" in str(found[0])
    assert [(error.kind, error.since) for error in found] == [("not_finite", 3)] * 2


def test_what_the_runtime_has_left_out_is_not_computed_and_the_data_goes_on_behind_it(dataset: Path, tmp_path: Path):
    skipped = run_ranks(2, broken, write_config(tmp_path / "a", dataset), {3: 2, 4: 2})[0]
    told = run_ranks(2, leaving_out, write_config(tmp_path / "b", dataset), 3, 4)[0]
    assert not ledger(told)
    assert [line[2] for line in outcomes(told)] == [None, None, "rolled_back", "rolled_back", *[None] * 4]
    assert [line[:2] for line in outcomes(told) if line[2] is None] == [line[:2] for line in outcomes(skipped) if line[2] is None]


# -- instruments ---------------------------------------------------------------------------------------------------------


def test_metrics_have_timers_memory_and_sizes_and_a_profile_is_written(dataset: Path, tmp_path: Path):
    logging = {"profile_steps": [2, 3], "profile_ranks": [1], "world_size": True}
    told = trained(write_config(tmp_path, dataset, logging=logging), 2)
    (line, *_) = [line for line in told if line["event"] == "step"]
    assert line["batch_size"] == 12
    assert line["world_size"] == 2
    assert line["memory_bytes"] > 10e6
    assert 0 < line["forward_backward_s"] + line["reduce_s"] + line["optimizer_s"] + line["data_s"] <= line["step_s"]
    (profile,) = (tmp_path / "run" / "profile").iterdir()
    events = json.loads(profile.read_bytes())["traceEvents"]
    assert profile.name == "g0-rank1.json"
    assert sum(event.get("name") == "forward_backward" and event.get("cat") == "user_annotation" for event in events) == 2


def test_switches_leave_out_what_nobody_asked_for(dataset: Path, tmp_path: Path):
    logging = {"timers": False, "memory": False, "batch_size": False, "validation_ppl": False}
    told = trained(write_config(tmp_path, dataset, logging=logging), 1)
    line = next(line for line in told if line["event"] == "step")
    contract = {"step", "loss", "grad_norm", "lr", "samples", "tokens", "step_s", "tokens_per_s", "mfu"}
    assert set(line) == {"event", *contract}
    assert not any("val_ppl" in line for line in told)


def captured(config: Path) -> list[dict[str, Any]]:
    """Train on this rank with graphs that are captured and differentiated, but run without kernels of their own."""
    whole = torch.compile
    with mock.patch.object(torch, "compile", lambda given, fullgraph: whole(given, backend="aot_eager", fullgraph=fullgraph)):
        return train(config)


@pytest.mark.soak
@pytest.mark.parametrize("with_kernels", [False, soaked(True)])
def test_compiled_layers_train_the_same(dataset: Path, tmp_path: Path, with_kernels: bool):
    settings = {"precision": "fp32", "steps": 3, "global_batch_size": 12, "micro_batch_size": 6, "eval_interval": 0}
    eager = outcomes(trained(write_config(tmp_path / "a", dataset, train=settings), 1))
    config = write_config(tmp_path / "b", dataset, train={**settings, "compile": True})
    # A C++ compiler takes a second of processor time for each of twenty kernels.
    compiled = outcomes(trained(config, 1) if with_kernels else run_ranks(1, captured, config)[0])
    assert [line[1] for line in compiled] == pytest.approx([line[1] for line in eager], rel=1e-5)


# -- batches -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 6), st.integers(1, 400), st.integers(0, 80))
def test_a_ramp_up_rises_to_the_full_batch_and_counts_every_sample(start, increment, rises, samples, steps_taken):
    full = start + increment * rises
    ramp = {"start": start, "increment": increment, "samples": samples}
    sizes = Config.model_validate({"train": {"global_batch_size": full, "batch_rampup": ramp}}).train.batches
    consumed, seen = 0, []
    for step in range(steps_taken):
        assert sizes.consumed(step) == consumed
        seen.append(sizes.at(consumed))
        consumed += seen[-1]
    assert seen == sorted(seen)
    assert set(seen) <= set(sizes.sizes())
    assert sizes.at(samples) == full
    assert not seen or (seen[0] == start and sizes.steps(consumed) == steps_taken)


def test_steps_follow_from_samples():
    train_section = Config.model_validate({"train": {"samples": 1000, "global_batch_size": 16}}).train
    assert (train_section.steps, train_section.samples) == (62, 1000)


class Fixed:
    """Samples that are given."""

    def __init__(self, windows: list[list[int]]) -> None:
        self._windows = np.array(windows)

    def get(self, numbers: np.ndarray) -> np.ndarray:
        return self._windows[numbers]


def read(windows: list[list[int]], **data: object) -> Any:
    from types import SimpleNamespace

    config = Config.model_validate(
        {"data": data, "model": {"seq_len": 6, "position": "learned"}, "train": {"micro_batch_size": 1, "global_batch_size": 2}}
    )
    ranks: Any = SimpleNamespace(layout=SimpleNamespace(dp=1, cp=1), dp_rank=0)
    samples: Any = Fixed(windows)
    return Batches(config, ranks, torch.device("cpu"), 9).read(samples, 0, len(windows))


def test_documents_are_told_apart_after_their_end_and_positions_begin_anew():
    batch, counted = read([[1, 2, 9, 3, 4, 5, 6], [9, 1, 9, 9, 2, 3, 4]], mask_documents=True)
    assert batch.documents.numbers.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 3, 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 1, 0, 0, 1]]
    assert int(counted) == 12


def test_what_follows_an_end_of_text_need_not_be_predicted():
    batch, counted = read([[1, 2, 9, 3, 4, 5, 6]], mask_end_of_text=True)
    assert batch.targets.tolist() == [[2, 9, -100, 4, 5, 6]]
    assert int(counted) == 5
    assert batch.documents is None


# -- Adan ----------------------------------------------------------------------------------------------------------------


def test_adan_does_what_its_paper_says():
    """Algorithm 1 of Xie et al. (2022), by hand in NumPy."""
    random = np.random.default_rng(0)
    start, gradients = random.normal(size=5), random.normal(size=(6, 5))
    first, second, third, rate, decay, eps = 0.98, 0.92, 0.99, 0.1, 0.02, 1e-8
    value, mean, change, square, before = start.copy(), np.zeros(5), np.zeros(5), np.zeros(5), gradients[0]
    for step, gradient in enumerate(gradients, 1):
        difference = gradient - before
        mean = first * mean + (1 - first) * gradient
        change = second * change + (1 - second) * difference
        square = third * square + (1 - third) * (gradient + second * difference) ** 2
        corrected = mean / (1 - first**step) + second * change / (1 - second**step)
        value = (value - rate * corrected / (np.sqrt(square / (1 - third**step)) + eps)) / (1 + rate * decay)
        before = gradient
    parameter = nn.Parameter(torch.tensor(start))
    optimizer = Adan([parameter], lr=rate, betas=(first, second, third), eps=eps, weight_decay=decay)
    state = optimizer.state[parameter]
    state["step"] = torch.zeros(())
    for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"):
        state[name] = torch.zeros_like(parameter)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert parameter.detach().numpy() == pytest.approx(value, rel=1e-12)


def test_a_loss_that_is_no_number_is_not_among_those_that_spikes_are_told_from(dataset: Path, tmp_path: Path):
    guard = {"not_finite": False, "spike": 6.0, "window": 2}
    config = write_config(tmp_path, dataset, train={"guard": guard, "steps": 6}, checkpoint={"every_steps": 2})
    (told,) = run_ranks(1, without_a_loss, config, 2)
    assert [line[0] for line in outcomes(told)] == [1, 2, 3, 4, 5, 6]


def without_a_loss(config: Path, step: int) -> list[dict[str, Any]]:
    """Train on this rank, and find no number for the loss of a step."""
    from trainer.loop import Trainer

    whole = Trainer._attempt

    def attempt(self: Trainer, size: int) -> Any:
        found, bad = whole(self, size)
        return (replace(found, loss=NAN) if self.state.progress.step + 1 == step else found), bad

    with mock.patch.object(Trainer, "_attempt", attempt):
        return train(config)


@pytest.mark.parametrize("optimizer", ["adamw", soaked("adan")])
def test_after_a_skipped_batch_a_run_that_was_stopped_goes_on_as_one_that_was_not(dataset: Path, tmp_path: Path, optimizer: str):
    kind = {"optimizer": {"name": optimizer}}
    (whole,) = run_ranks(1, broken, write_config(tmp_path / "whole", dataset, **kind), {3: 2})
    config = write_config(tmp_path / "parts", dataset, **kind)
    (first,) = run_ranks(1, broken, config, {3: 2}, 5)
    assert outcomes(first) + outcomes(trained(config, 1)) == outcomes(whole)
