"""The learning rate as a function of the samples consumed. Pure."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.worker import Config


def learning_rate(samples: int, *, peak: float, floor: float, warmup: int, decay: int, kind: str = "cosine") -> float:
    """Linear warm-up from 0 to `peak`, then a cosine to `floor` at `decay` samples (Loshchilov and Hutter, 2017), then `floor`.

    Args:
        samples: consumed once this step is done.
        warmup, decay: in samples, `decay` counted from the start.
        kind: `cosine`, or `constant` at the peak.
    """
    if samples < warmup:
        return peak * samples / warmup
    if kind == "constant":
        return peak
    if samples >= decay:
        return floor
    progress = (samples - warmup) / (decay - warmup)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def for_config(config: "Config", samples: int) -> float:
    """The learning rate of a campaign."""
    optimizer = config.optimizer
    whole = config.train.steps * config.train.global_batch_size
    return learning_rate(
        samples,
        peak=optimizer.lr,
        floor=optimizer.min_lr,
        warmup=optimizer.warmup_samples,
        decay=whole if optimizer.decay_samples == "auto" else optimizer.decay_samples,
        kind=optimizer.schedule,
    )
