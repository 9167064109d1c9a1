"""The step of the optimizer: gradients clipped, bad batches kept out of the weights.

AdamW's fused kernels do both on the device: they divide gradients by a number that lies there, and leave weights and moments as
they are where another one says so. So the host asks for the step before it knows the verdict, and waits for the device only once
it has nothing left to ask of it. The other optimizers get to know the verdict first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer import gradients
from trainer.adamw import AdamW
from trainer.gradients import Found, Measured
from trainer.guard import Bad, Limits, judge
from trainer.model import GPT


class Update:
    """Steps of an optimizer over this rank's stages.

    Args:
        clip_grad: the largest norm of the whole gradient; 0: any.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stages: Sequence[GPT], clip_grad: float) -> None:
        self._optimizer, self._stages, self._clip_grad = optimizer, stages, clip_grad
        self._fused = optimizer if isinstance(optimizer, AdamW) else None

    def step(self, measured: Measured, limits: Limits) -> tuple[Found, Bad | None]:
        """Change the weights, unless the batch is bad; what is found of it, and what is wrong with it."""
        if self._fused is None:
            found = measured.read()
            bad = judge(found.loss, found.norm, limits)
            if bad is None:
                gradients.clip(self._stages, measured.norm, self._clip_grad)
                self._optimizer.step()
            return found, bad
        self._fused.grad_scale = gradients.excess(measured.norm, self._clip_grad) if self._clip_grad else None
        self._fused.found_inf = _is_bad(measured, limits)
        self._fused.step()
        found = measured.read()
        return found, judge(found.loss, found.norm, limits)


def _is_bad(measured: Measured, limits: Limits) -> Tensor | None:
    """1 if `judge` says of the same numbers that they are bad, else 0, fp32; None: nothing is ever bad."""
    verdicts = []
    if limits.not_finite:
        verdicts.append(~(measured.loss.isfinite() & measured.norm.isfinite()))
    if limits.highest is not None:
        verdicts.append(measured.loss > limits.highest)
    return torch.stack(verdicts).any().float() if verdicts else None
