"""AdamW (Loshchilov and Hutter, 2019) or Adan: weight decay on matrices only, the state there before the first step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.adan import Adan
from trainer.model import GPT

if TYPE_CHECKING:
    from resilient.worker import Config

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adan": ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")}


def make_optimizer(config: "Config", stages: Sequence[GPT]) -> torch.optim.Optimizer:
    """The optimizer of this rank's stages, its moments zero.

    Under μP (Yang et al., 2022) matrices have a smaller rate the wider they are, and a larger decay, so that their product stays.
    """
    wanted = config.optimizer
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for model in stages:
        known = {weight.name: weight for weight in model.shape.weights()}
        for name, parameter in model.named_parameters():
            weight = known[model.global_name(name)]
            rate = model.shape.rate(weight)
            decay = wanted.weight_decay / rate if len(weight.shape) > 1 else 0.0
            groups.setdefault((rate, decay), []).append(parameter)
    options: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "rate": rate} for (rate, decay), parameters in groups.items()
    ]
    optimizer: torch.optim.Optimizer
    if wanted.name == "adan":
        optimizer = Adan(options, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps)
    else:
        optimizer = torch.optim.AdamW(options, lr=wanted.lr, betas=wanted.betas[:2], eps=wanted.eps, fused=True)
    for parameters in groups.values():
        for parameter in parameters:
            state = optimizer.state[parameter]
            device = parameter.device if wanted.name == "adamw" else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for moment in MOMENTS[wanted.name]:
                state[moment] = torch.zeros_like(parameter)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate"]
