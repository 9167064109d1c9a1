"""A loss that is far off."""

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext
from chaos.primitives.tensors import MAX_SKIPS, until_finished


class LossSpike(Inside):
    """The loss is far above what it was, as the outputs of a rank's model are far off; seen where `train.guard.spike` is set."""

    factor: float = Field(1000.0, gt=1, description="by which the outputs are too large")
    steps: int = Field(0, ge=0, description="whose batches are bad however often they are computed; 0: the next pass alone is bad")

    def expects(self) -> Expectation:
        kinds = frozenset({"loss_spike", "not_finite"})
        if not self.steps:
            return Expectation(kinds, frozenset({"recompute_batch"}))
        return Expectation(
            kinds,
            frozenset({"recompute_batch", "skip_batch", "roll_back"}),
            lost_steps=self.steps,
            exact=self.steps > MAX_SKIPS,
        )

    def strike(self, context: RankContext) -> None:
        from chaos.primitives.tensors import scale_outputs

        stop = scale_outputs(self.factor, once=not self.steps)
        if self.steps:
            context.follow(until_finished(context.step + self.steps - 1, stop))
