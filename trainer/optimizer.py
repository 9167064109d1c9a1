"""AdamW (Loshchilov and Hutter, 2019): weight decay on matrices only, its state there before the first step."""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from resilient.worker import Config

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(config: "Config", model: nn.Module) -> torch.optim.AdamW:
    """The optimizer, its moments zero."""
    wanted = config.optimizer
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": wanted.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=wanted.lr,
        betas=(wanted.beta1, wanted.beta2),
        eps=wanted.eps,
        fused=True,
    )
    for parameter in parameters:
        state = optimizer.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
