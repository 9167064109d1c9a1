"""What keeps a bad batch out of the weights. Pure: numbers to a verdict, the same on all ranks.

A batch whose loss or gradient norm is not finite, or whose loss is far above what the last steps show, is computed again from the
same weights: were it a fault of the hardware, it is well now. Bad a second time, it is the data, and the batch is skipped. When too
many are skipped in a row it is the weights, and the attempt ends: the runtime goes back to a checkpoint from before the first of
them, and where the same batches are bad again, has them left out.
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


def judge(loss: float, norm: float, history: Sequence[float], *, not_finite: bool, spike: float | None, window: int) -> Bad | None:
    """What is wrong with a step, None if nothing is.

    Args:
        history: losses of the steps before, the newest last; a spike is looked for once there are `window` of them.
        spike: standard deviations above their mean that are too many.
    """
    if not_finite and not (math.isfinite(loss) and math.isfinite(norm)):
        return Bad("not_finite", f"loss {loss!r}, gradient norm {norm!r}")
    if spike is not None and len(history) >= window:
        mean, deviation = fmean(history[-window:]), pstdev(history[-window:])
        if loss > mean + spike * max(deviation, 1e-6 * abs(mean)):
            return Bad("loss_spike", f"loss {loss!r} against a mean of {mean:.4f} ± {deviation:.4f} over {window} steps")
    return None


class BadBatch(worker.BadNumbersError):
    """Too many batches in a row were bad: it is not the data."""
