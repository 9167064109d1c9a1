"""transformers' Trainer with its callback: what it goes on from, with what is done behind a step, and what is refused."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from attempts import AT, TOTAL, Attempts

from resilient import worker

MORE = 2 * AT + 1  # a snapshot more than the one at AT, and the last one: there are buffers for three
EVERY = {"eval_strategy": "steps", "eval_steps": AT}
FORMS: dict[str, dict[str, Any]] = {
    "steps": {"rows": 5 * AT, **EVERY},
    "steps that are saved": {"rows": 5 * AT, **EVERY, "save_strategy": "steps", "save_steps": AT},
    "steps that are logged": {"rows": 5 * AT, **EVERY, "logging_steps": 1},
    "epochs": {"rows": 2 * AT, "eval_strategy": "epoch"},
    "asked for by a callback behind it": {"rows": 5 * AT, "eval_strategy": "steps", "eval_steps": MORE, "asks_at": AT},
}


@pytest.fixture
def trained() -> Any:
    """Imports transformers, which takes seconds, in the processes that run these tests alone."""
    return importlib.import_module("trained")


def goes_on(attempts: Attempts, trained: Any, folder: Path, **form: Any) -> tuple[Any, Any, Any]:
    """Assert that an attempt, and a second one that goes on from step `AT`, come to what a calm one comes to: these three."""
    calm = trained.Script(folder / "calm", MORE, **form)
    calm.train()
    attempts.begin()
    first = trained.Script(folder / "run", MORE, **form)
    first.train_up_to(AT + 1)
    attempts.held(AT)
    attempts.begin(AT)
    second = trained.Script(folder / "run", MORE, **form)
    second.train()
    assert min(second.steps) == AT + 1, "it went on from the snapshot"
    assert {step: first.steps.get(step) or second.steps[step] for step in calm.steps} == calm.steps
    return calm, first, second


def test_a_model_that_is_none_of_transformers_goes_on_from_a_snapshot(attempts: Attempts, trained: Any, tmp_path: Path):
    goes_on(attempts, trained, tmp_path, rows=5 * AT)


@pytest.mark.parametrize("what", ["model_init", "model", "optimizer"])
def test_a_trainer_that_trains_another_model_or_optimizer_than_its_snapshots_have_is_refused(
    attempts: Attempts, trained: Any, tmp_path: Path, what: str
):
    attempts.begin()
    script = trained.Script(tmp_path, TOTAL, rows=2 * TOTAL)
    if what == "model_init":
        script.trainer.model_init = trained.Model
        with pytest.raises(ValueError, match="model_init"):
            script.train()
        return
    otherwise = script.callback.resume(script.trainer)
    if what == "model":
        script.trainer.model = script.trainer.model_wrapped = trained.Model()
    else:
        script.trainer.optimizer = trained.torch.optim.SGD(script.model.parameters(), 0.1)
    with pytest.raises(ValueError, match=rf"another {what} than .*resume was given"):
        script.trainer.train(resume_from_checkpoint=otherwise)
    assert not script.steps


@pytest.mark.parametrize("form", FORMS)
def test_a_snapshot_has_what_the_evaluation_behind_its_step_has_changed(
    attempts: Attempts, trained: Any, tmp_path: Path, form: str
):
    """The best metric, and a learning rate that follows the metric."""
    calm, first, second = goes_on(attempts, trained, tmp_path, **FORMS[form])
    assert first.evaluated + second.evaluated == calm.evaluated and AT in calm.evaluated


def test_evaluations_without_a_better_metric_are_counted_on_so_that_a_training_ends_early_where_a_calm_one_does(
    attempts: Attempts, trained: Any, tmp_path: Path
):
    calm, _, second = goes_on(attempts, trained, tmp_path, rows=5 * AT, eval_strategy="steps", eval_steps=3, patience=3)
    assert max(second.steps) == max(calm.steps) == 12


@pytest.mark.parametrize(("at", "form"), [(AT, "steps"), (AT, "epochs"), (AT - 2, "epochs")])
def test_a_stop_evaluates_what_is_due_then_and_nothing_else_and_saves(
    attempts: Attempts, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, form: str
):
    calm = trained.Script(tmp_path / "calm", AT + 2, **FORMS[form])
    calm.train()
    attempts.begin()
    beaten: list[int] = []
    monkeypatch.setattr(worker, "beat", beaten.append)
    monkeypatch.setattr(worker, "should_stop", lambda: "drain" if beaten[-1:] == [at] else None)
    first = trained.Script(tmp_path / "run", AT + 2, **FORMS[form])
    first.train()
    assert beaten == [*range(1, at + 1)]
    assert first.evaluated == [AT] * (at == AT)
    assert (tmp_path / f"run/checkpoint-{at}/trainer_state.json").exists()
    attempts.held(at)
    attempts.begin(at)
    second = trained.Script(tmp_path / "run", AT + 2, **FORMS[form])
    second.train()
    assert {**first.steps, **second.steps} == calm.steps and min(second.steps) == at + 1


@pytest.mark.parametrize("last", [AT, AT - 2], ids=["due in RAM", "for the durable tier alone"])
def test_the_last_snapshot_has_the_weights_of_the_last_step_where_the_best_ones_are_loaded_at_the_end(
    attempts: Attempts, trained: Any, tmp_path: Path, last: int
):
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    attempts.begin()
    first = trained.Script(tmp_path, last, rows=5 * AT, load_best_model_at_end=True, **every)
    first.train()
    assert first.weights() == first.steps[1][0], "the best ones are those of the first step"
    attempts.held(last)
    attempts.begin(last)
    second = trained.Script(tmp_path, last, rows=5 * AT, load_best_model_at_end=True, **every)
    second.callback.resume(second.trainer)
    assert second.weights() == first.steps[last][0]
