"""Retention: which checkpoints are superseded.

Owns the decision. Pure; deletes nothing.
"""

from collections.abc import Iterable


def superseded(steps: Iterable[int], keep_last: int, keep_every: int | None = None, upto: int | None = None) -> list[int]:
    """The steps to give up, ascending: all but the newest `keep_last` and the multiples of `keep_every`.

    Args:
        upto: steps above it are neither counted nor given up. They come from a past that was rolled back; counting them
            would give up the checkpoint that has just been written.

    Raises ValueError unless `keep_last` and `keep_every` are at least 1: the newest is never given up.
    """
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise ValueError(f"keep_last ({keep_last}) and keep_every ({keep_every}) must be at least 1")
    counted = sorted(step for step in steps if upto is None or step <= upto)
    return [step for step in counted[:-keep_last] if keep_every is None or step % keep_every]
