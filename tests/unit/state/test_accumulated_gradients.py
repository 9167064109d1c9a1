"""A loop whose steps are micro batches: gradients add up and are in no snapshot, which waits until an optimizer has stepped."""

import logging

import pytest
import torch
from attempts import AT, TOTAL, Attempts, Script

from resilient import worker
from resilient.state import accumulation
from resilient.state.accumulation import Accumulation
from resilient.state.modules import ModelTensors

MICRO_BATCHES = 4
WHOLE = AT + 1  # the first step after AT in which the optimizer steps
assert AT % MICRO_BATCHES and WHOLE % MICRO_BATCHES == 0


class Accumulating(Script):
    """Its optimizer steps once for several steps of its loop."""

    def train(self, total: int) -> int:
        """Returns how many steps are done."""
        snapshots = self.attach()
        for step in snapshots.steps(total):
            loss = self.model(torch.randn(8, 6, generator=self.noise)).square().mean() / MICRO_BATCHES
            loss.backward()
            if (step + 1) % MICRO_BATCHES == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return int(snapshots.step)


def expected_losses() -> list[float]:
    script = Accumulating()
    script.train(TOTAL)
    return script.losses


def test_a_snapshot_that_is_due_while_gradients_add_up_is_taken_when_the_optimizer_has_stepped(attempts: Attempts):
    expected = expected_losses()
    attempts.begin()
    first = Accumulating()
    first.train(WHOLE + 1)
    attempts.held(WHOLE)
    attempts.begin(WHOLE)
    second = Accumulating()
    second.train(TOTAL)
    assert first.losses[:WHOLE] + second.losses == expected


def test_a_stop_waits_until_gradients_have_added_up(attempts: Attempts, monkeypatch: pytest.MonkeyPatch):
    expected = expected_losses()
    attempts.begin()
    first = Accumulating()
    with monkeypatch.context() as asked:
        asked.setattr(worker, "should_stop", lambda: "asked" if len(first.losses) >= MICRO_BATCHES + 1 else None)
        assert first.train(TOTAL) == 2 * MICRO_BATCHES, "the step in which the optimizer steps next"
    attempts.held(2 * MICRO_BATCHES)
    attempts.begin(2 * MICRO_BATCHES)
    second = Accumulating()
    second.train(TOTAL)
    assert first.losses + second.losses == expected


def test_an_optimizer_that_is_not_seen_to_step_is_not_waited_for_for_ever(caplog: pytest.LogCaptureFixture):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    seen = Accumulation([ModelTensors(model)], [optimizer])
    seen.end_step()
    assert seen.whole, "there are no gradients"
    model(torch.ones(1)).backward()
    for _ in range(accumulation.MOST_STEPS):
        seen.end_step()
        assert not seen.whole
    with caplog.at_level(logging.WARNING):
        seen.end_step()
        seen.end_step()
    assert seen.whole and len(caplog.records) == 1
    optimizer.step()
    seen.end_step()
    seen.end_step()
    assert not seen.whole, "it is seen now"
