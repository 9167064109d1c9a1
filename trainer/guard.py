"""What keeps a bad batch out of the weights. Pure: numbers to a verdict, the same on all ranks.

A batch whose loss or gradient norm is not finite, or whose loss is far above what the last steps show, is computed again from the
same weights: were it a fault of the hardware, it is well now. Bad a second time, it is the data or the weights, and the batch is
skipped. When too many are skipped in a row it is the weights, and the attempt ends: the runtime goes back to a checkpoint from
before the first of them, and where the same batches are bad again, has them left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

from resilient import worker

Kind = Literal["not_finite", "loss_spike"]


@dataclass(frozen=True)
class Bad:
    """What is wrong with a batch."""

    kind: Kind
    detail: str


@dataclass(frozen=True)
class Limits:
    """What a batch is judged by.

    Args:
        not_finite: a loss or a norm that is no finite number is bad.
        highest: a loss above it is a spike; None: no loss is.
        usual: what `highest` is of, for people.
    """

    not_finite: bool
    highest: float | None
    usual: str


def limits(history: Sequence[float], *, not_finite: bool, spike: float | None, window: int) -> Limits:
    """The limits of a step.

    Args:
        history: losses of the steps before, the newest last; a spike is looked for once there are `window` of them.
        spike: standard deviations above their mean that are too many.
    """
    if spike is None or len(history) < window:
        return Limits(not_finite, None, "")
    mean, deviation = fmean(history[-window:]), pstdev(history[-window:])
    highest = mean + spike * max(deviation, 1e-6 * abs(mean))
    return Limits(not_finite, highest, f"a mean of {mean:.4f} ± {deviation:.4f} over {window} steps")


def judge(loss: float, norm: float, limits: Limits) -> Bad | None:
    """What is wrong with a step, None if nothing is. `trainer.update` finds the same on the device."""
    if limits.not_finite and not (math.isfinite(loss) and math.isfinite(norm)):
        return Bad("not_finite", f"loss {loss!r}, gradient norm {norm!r}")
    if limits.highest is not None and loss > limits.highest:
        return Bad("loss_spike", f"loss {loss!r} against {limits.usual}")
    return None


class BadBatch(worker.BadNumbersError):
    """Too many batches in a row were bad: it is not the data."""
