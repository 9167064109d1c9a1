"""A bit of a weight flips."""

import json

from chaos.fault import Expectation, Inside
from chaos.hands.scene import Place
from chaos.means.tensors import MAX_SKIPS


class WeightFlip(Inside):
    """The top exponent bit of one weight flips after an update, silently; the numbers that come of it are seen, and rolled back."""

    def expects(self) -> Expectation:
        kinds, actions = frozenset({"not_finite", "loss_spike"}), frozenset({"recompute_batch", "skip_batch", "roll_back"})
        return Expectation(kinds, actions, lost_steps=MAX_SKIPS + 2)

    def strike(self, place: Place) -> None:
        from chaos.means.tensors import flip_after_next_update

        told = place.run_dir / "chaos" / f"flipped-{place.step}-rank{place.rank}.json"
        flip_after_next_update(lambda flipped: told.write_text(json.dumps(flipped)))
