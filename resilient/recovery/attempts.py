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
        began: the step that it went on from.
    """

    steps: int | None
    saved: bool
    lived_s: float
    began: int = 0


def got_on(attempt: Attempt, earlier: Sequence[Attempt]) -> bool:
    """Whether an attempt has got on, so that failures before it say nothing of the next one.

    It has if it wrote a checkpoint, or went on from a later step than the attempt before it, or finished more steps. Where neither
    was ever seen, it has if it lived for ten minutes.

    Args:
        earlier: the attempts before it that failed, oldest first.
    """
    if attempt.saved:
        return True
    if attempt.steps is not None:
        before = earlier[-1] if earlier else Attempt(None, False, 0.0, attempt.began)
        return attempt.began > before.began or attempt.steps > (before.steps or 0)
    return attempt.lived_s >= LIFE_S and not any(each.saved or each.steps is not None for each in earlier)
