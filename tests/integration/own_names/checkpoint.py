"""Activations that are computed again, as scripts have them in a module of this name."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint


def again(block: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, inputs, use_reentrant=False)
