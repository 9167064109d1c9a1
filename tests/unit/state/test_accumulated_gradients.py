"""A loop whose steps are micro batches: gradients that add up are in no snapshot, and its author is told so."""

import logging

import pytest
import torch

from resilient.state.accumulation import Accumulation
from resilient.state.modules import ModelTensors


class Loop:
    """A model, and what was seen of its optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.seen = Accumulation([ModelTensors(self.model)], [self.optimizer])

    def backward(self) -> None:
        self.model(torch.ones(1, 1)).sum().backward()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def test_gradients_that_add_up_over_steps_are_warned_of_once(warnings: pytest.LogCaptureFixture):
    loop = Loop()
    for step in range(1, 9):
        loop.backward()
        if step % 2 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.seen.end_step(step)
    (record,) = warnings.records
    assert "step 1 has left gradients" in record.getMessage() and "make the whole round one step" in record.getMessage()


@pytest.mark.parametrize("cleared", ["before", "after", "never"])
def test_a_step_with_an_optimizer_s_step_is_whole(warnings: pytest.LogCaptureFixture, cleared: str):
    loop = Loop()
    for step in range(1, 5):
        if cleared == "before":
            loop.optimizer.zero_grad()
        loop.backward()
        loop.optimizer.step()
        if cleared == "after":
            loop.optimizer.zero_grad()
        loop.seen.end_step(step)
    assert not warnings.records


def test_steps_without_gradients_and_optimizers_that_take_no_hook_are_no_reason(warnings: pytest.LogCaptureFixture):
    loop = Loop()
    loop.seen.end_step(1)
    del loop.optimizer._optimizer_step_post_hooks
    unseen = Accumulation([ModelTensors(loop.model)], [loop.optimizer])
    loop.backward()
    unseen.end_step(1)
    assert not warnings.records
