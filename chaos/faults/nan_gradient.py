"""Gradients that are no numbers."""

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext
from chaos.primitives.tensors import MAX_SKIPS, until_finished


class NanGradient(Inside):
    """Gradients of a rank are no numbers: once, as by a fault of the hardware, or for some steps."""

    steps: int = Field(0, ge=0, description="whose batches are bad however often they are computed; 0: the next pass alone is bad")

    def expects(self) -> Expectation:
        if not self.steps:
            return Expectation(frozenset({"not_finite"}), frozenset({"recompute_batch"}))
        # More steps than `train.guard.max_skips`: rolled back, and computed anew without the fault; else batches are left out.
        actions = frozenset({"recompute_batch", "skip_batch", "roll_back"})
        return Expectation(frozenset({"not_finite"}), actions, lost_steps=self.steps, exact=self.steps > MAX_SKIPS)

    def strike(self, context: RankContext) -> None:
        from chaos.primitives.tensors import spoil_gradients

        stop = spoil_gradients(once=not self.steps)
        if self.steps:
            context.follow(until_finished(context.step + self.steps - 1, stop))
