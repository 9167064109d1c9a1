"""A bit of a weight flips."""

import json

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext
from chaos.primitives.tensors import MAX_SKIPS


class WeightFlip(Inside):
    """The top exponent bit of one weight flips after an update, silently; the numbers that come of it are seen, and rolled back."""

    def expects(self) -> Expectation:
        kinds, actions = frozenset({"not_finite", "loss_spike"}), frozenset({"recompute_batch", "skip_batch", "roll_back"})
        return Expectation(kinds, actions, lost_steps=MAX_SKIPS + 2)

    def strike(self, context: RankContext) -> None:
        from chaos.primitives.tensors import flip_after_next_update

        record = context.run_dir / "chaos" / f"flipped-{context.step}-rank{context.rank}.json"
        flip_after_next_update(lambda flipped: record.write_text(json.dumps(flipped)))
