"""transformers' Trainer with its callback: what it goes on from, and what is refused."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from attempts import AT, TOTAL, Attempts

MORE = 2 * TOTAL


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
