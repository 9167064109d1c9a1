"""Inputs with noise."""

import torch


def noisy(inputs: torch.Tensor, step: int) -> torch.Tensor:
    return inputs + 0.1 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(step))
