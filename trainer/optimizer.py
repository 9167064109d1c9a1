"""AdamW (Loshchilov and Hutter, 2019), Adan or Muon: weight decay on matrices only, the state there before the first step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.adamw import AdamW
from trainer.adan import Adan
from trainer.model import GPT
from trainer.moments import ADAMW, moments, rule
from trainer.muon import Muon

if TYPE_CHECKING:
    from resilient.worker import Config


def make_optimizer(config: "Config", stages: Sequence[GPT], sharing: dist.ProcessGroup | None = None) -> torch.optim.Optimizer:
    """The optimizer of this rank's stages, its moments zero.

    Args:
        sharing: the ranks that hold the parts of these stages' parameters, which all call this; None: this one alone. For Muon.

    Under μP (Yang et al., 2022) matrices have a smaller rate the wider they are, and a larger decay, so that their product stays.
    """
    wanted = config.optimizer
    groups: dict[tuple[float, float, str], list[nn.Parameter]] = {}
    kept: list[tuple[nn.Parameter, tuple[str, ...]]] = []
    for model in stages:
        known = {weight.name: weight for weight in model.shape.weights()}
        for name, parameter in model.named_parameters():
            weight = known[model.global_name(name)]
            rate = model.shape.rate(weight)
            decay = wanted.weight_decay / rate if len(weight.shape) > 1 else 0.0
            groups.setdefault((rate, decay, rule(wanted.name, weight)), []).append(parameter)
            kept.append((parameter, moments(wanted.name, weight)))
    options: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay, "rate": rate, "muon": updated_by == "muon"}
        for (rate, decay, updated_by), parameters in groups.items()
    ]
    optimizer: torch.optim.Optimizer
    if wanted.name == "adan":
        optimizer = Adan(options, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps)
    elif wanted.name == "muon":
        optimizer = Muon(
            options,
            sharing=sharing,
            lr=wanted.lr,
            momentum=wanted.momentum,
            betas=wanted.betas[:2],
            eps=wanted.eps,
            dtype=torch.float32 if config.train.precision == "fp32" else torch.bfloat16,
        )
    else:
        optimizer = AdamW(options, lr=wanted.lr, betas=wanted.betas[:2], eps=wanted.eps)
    for parameter, names in kept:
        state = optimizer.state[parameter]
        device = parameter.device if names == ADAMW else torch.device("cpu")  # its fused kernels count on the device
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for moment in names:
            state[moment] = torch.zeros_like(parameter)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate"]
