"""The learning rate as a function of the samples consumed. Pure."""

import math
from typing import TYPE_CHECKING

from resilient.worker import spans

if TYPE_CHECKING:
    from resilient.worker import Config


def learning_rate(
    samples: int, *, peak: float, floor: float, warmup: int, decay: int, kind: str = "cosine", wsd_fraction: float = 0.1
) -> float:
    """Linear warm-up from 0 to `peak`, then a fall to `floor` at `decay` samples, then `floor`.

    Args:
        samples: consumed once this step is done.
        warmup, decay: in samples, `decay` counted from the start.
        kind: `cosine` (Loshchilov and Hutter, 2017); `linear`; `wsd`: at the peak until the last `wsd_fraction` of `decay`, then
            linear (Hu et al., 2024); `constant`: at the peak for ever.
    """
    if samples < warmup:
        return peak * samples / warmup
    if kind == "constant":
        return peak
    if samples >= decay:
        return floor
    start = max(warmup, round(decay * (1 - wsd_fraction))) if kind == "wsd" else warmup
    if samples <= start:
        return peak
    progress = (samples - start) / (decay - start)
    fall = 0.5 * (1.0 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0 - progress
    return floor + (peak - floor) * fall


def for_config(config: "Config", samples: int) -> float:
    """The learning rate of a campaign."""
    optimizer = config.optimizer
    warmup, decay = spans(config)
    return learning_rate(
        samples,
        peak=optimizer.lr,
        floor=optimizer.min_lr,
        warmup=warmup,
        decay=decay,
        kind=optimizer.schedule,
        wsd_fraction=optimizer.wsd_fraction,
    )
