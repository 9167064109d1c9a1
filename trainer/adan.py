"""Adan: adaptive Nesterov momentum (Xie et al., 2022), with decoupled weight decay."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from trainer.local import local


class Adan(torch.optim.Optimizer):
    """Adan over plain or distributed parameters; works on what lies on this rank.

    Args:
        betas: decay rates of the gradient, of its difference from the one before, and of the square.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float, float], eps: float, weight_decay: float = 0.0
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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)
        return None


def _update(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    first, second, third = group["betas"]
    state["step"] += 1
    step = float(state["step"])
    value, grad = local(parameter), local(grad)
    mean, change, square, before = (local(state[name]) for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"))
    if step == 1:
        before.copy_(grad)
    difference = grad - before
    mean.lerp_(grad, 1 - first)
    change.lerp_(difference, 1 - second)
    ahead = grad.add(difference, alpha=second)
    square.mul_(third).addcmul_(ahead, ahead, value=1 - third)
    before.copy_(grad)
    denominator = (square / (1 - third**step)).sqrt_().add_(group["eps"])
    update = mean / (1 - first**step) + change * (second / (1 - second**step))
    value.addcdiv_(update, denominator, value=-group["lr"])
    value.div_(1 + group["lr"] * group["weight_decay"])
