"""AdamW (Loshchilov and Hutter, 2019), by PyTorch's fused kernels."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.local import local


class AdamW(torch.optim.Optimizer):
    """AdamW over plain or distributed parameters; works on what lies on this rank.

    With `torch.optim.AdamW`, DTensor works out in each new process how one operation over all distributed parameters is sharded,
    in time that grows with the square of their number (of 196: 80 times that of a step).

    Attributes:
        grad_scale: gradients are divided by it, fp32; None: by nothing.
        found_inf: 1, fp32: the next step leaves weights and moments as they are; 0 or None: it does not.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            update(group, self.state, grad_scale=self.grad_scale, found_inf=self.found_inf)
        return None


def update(
    group: Mapping[str, Any],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update the parameters of a group that have a gradient.

    Args:
        group: with lr, betas, eps and weight_decay.
        state: of each parameter its step, exp_avg and exp_avg_sq.
        grad_scale, found_inf: see `AdamW`.
    """
    updated = [parameter for parameter in group["params"] if parameter.grad is not None]
    states = [state[parameter] for parameter in updated]
    adamw(
        [local(parameter) for parameter in updated],
        [local(parameter.grad) for parameter in updated],
        [local(each["exp_avg"]) for each in states],
        [local(each["exp_avg_sq"]) for each in states],
        [],
        [each["step"] for each in states],
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
