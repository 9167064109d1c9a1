"""Which attention kernel runs. `model.attention` asks; this device answers.

Owns the choice alone: the model calls PyTorch's scaled_dot_product_attention and never knows which kernel it got.
"""

import logging

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from resilient.worker import ConfigError, Problem

log = logging.getLogger(__name__)


def choose(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> SDPBackend:
    """The kernel for `auto`, `sdpa_flash` or `math`; tried out on a small example.

    Raises:
        ConfigError: flash was asked for by name, and does not run here.
    """
    if wanted == "math":
        return SDPBackend.MATH
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            x = torch.zeros(1, 1, 16, head_dim, device=device, dtype=dtype, requires_grad=True)
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            torch.autograd.backward(y.sum())
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if wanted == "sdpa_flash":
            message = f"the flash kernel does not run here ({reason}); allowed: auto, math"
            raise ConfigError([Problem("model.attention", wanted, message)]) from None
        log.warning("flash attention does not run here (%s); using the math kernel", reason)
        return SDPBackend.MATH
    return SDPBackend.FLASH_ATTENTION
