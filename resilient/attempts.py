"""Attempts of a training script of which nothing is known but what could be observed: whether one has got on. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

LIFE_S = 600.0


@dataclass(frozen=True)
class Attempt:
    """What a generation came to, from its start to its fault.

    Attributes:
        steps: optimizer steps that it finished; None where none was seen.
        saved: the script wrote a checkpoint, and went on from there.
        lived_s: how long its ranks ran.
    """

    steps: int | None
    saved: bool
    lived_s: float


def got_on(attempt: Attempt, earlier: Sequence[Attempt]) -> bool:
    """Whether an attempt has got on, so that failures before it say nothing of the next one.

    It has if it wrote a checkpoint, or finished more steps than the attempt before it. Where neither was ever seen, it has if it
    lived for ten minutes.

    Args:
        earlier: the attempts before it that failed, oldest first.
    """
    if attempt.saved:
        return True
    if attempt.steps is not None:
        before = earlier[-1].steps if earlier else None
        return attempt.steps > (before or 0)
    return attempt.lived_s >= LIFE_S and not any(each.saved or each.steps is not None for each in earlier)
