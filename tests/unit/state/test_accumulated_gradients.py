"""A loop whose steps are micro batches: gradients that add up are in no snapshot, and its author is told so."""

import logging

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    del loop.optimizer._optimizer_step_pre_hooks, loop.optimizer._optimizer_step_post_hooks
    unseen = Accumulation([ModelTensors(loop.model)], [loop.optimizer])
    loop.backward()
    unseen.end_step(1)
    assert not warnings.records


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "zeroed"])
def test_rounds_of_any_length_are_told_whether_gradients_are_dropped_or_zeroed(
    warnings: pytest.LogCaptureFixture, length: int, kept: bool
):
    loop = Loop()
    for step in range(1, 2 * length + 1):
        loop.backward()
        if step % length == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad(set_to_none=not kept)
        loop.seen.end_step(step)
    (record,) = warnings.records
    assert "step 1 has left gradients" in record.getMessage()


@pytest.mark.parametrize("kept", [False, True], ids=["dropped", "zeroed"])
@pytest.mark.parametrize("first", [False, True], ids=["behind", "ahead"])
def test_steps_that_a_gradient_scaler_leaves_out_are_no_reason_and_rounds_behind_them_are_told(
    warnings: pytest.LogCaptureFixture, kept: bool, first: bool
):
    loop, scaler = Loop(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(1, 6):
        if first:
            loop.optimizer.zero_grad(set_to_none=not kept)
        scaler.scale(loop.model(torch.full((1, 1), 1e36 if step in (1, 2, 4) else 1.0)).sum()).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if not first:
            loop.optimizer.zero_grad(set_to_none=not kept)
        loop.seen.end_step(step)
    assert scaler.get_scale() == 2.0**13 and not warnings.records
    for step in (6, 7):
        loop.backward()
        loop.seen.end_step(step)
    assert "step 6 has left gradients" in warnings.text


def test_a_step_that_the_script_itself_leaves_out_is_no_reason(warnings: pytest.LogCaptureFixture):
    loop = Loop()
    for step in range(1, 6):
        loop.optimizer.zero_grad()
        loop.backward()
        if step % 2 == 0:
            loop.optimizer.step()
        loop.seen.end_step(step)
    assert not warnings.records


def test_steps_of_an_optimizer_that_nobody_sees_are_no_reason(warnings: pytest.LogCaptureFixture):
    loop = Loop()
    loop.optimizer._optimizer_step_pre_hooks.clear()
    loop.optimizer._optimizer_step_post_hooks.clear()
    for step in range(1, 6):
        loop.optimizer.zero_grad(set_to_none=False)
        loop.backward()
        loop.optimizer.step()
        loop.seen.end_step(step)
    assert not warnings.records


def test_gradients_that_fsdp_keeps_to_itself_are_told(warnings: pytest.LogCaptureFixture, alone: None):
    model = torch.nn.Linear(1, 1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = Accumulation([ModelTensors(model)], [optimizer])
    for step in range(1, 4):
        last = step != 2
        model.set_requires_gradient_sync(last)
        model(torch.ones(1, 1)).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        seen.end_step(step)
    (record,) = warnings.records
    assert "step 2 has left gradients" in record.getMessage()
