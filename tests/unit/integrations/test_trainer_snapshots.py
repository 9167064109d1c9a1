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
    goes_on(attempts, trained, tmp_path, rows=5 * AT, lr_scheduler_type="linear", lr_scheduler_kwargs=None)
