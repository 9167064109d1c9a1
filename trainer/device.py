"""What the trainer needs of a GPU beside its computing: which one is whose, and copies to it."""

import torch
from torch import Tensor

from resilient.worker import Config, Context


def kind(config: Config, decided: str | None) -> str:
    """What ranks compute on, `cpu` or `cuda`.

    Args:
        decided: by the supervisor, for all ranks alike; None: this machine decides.
    """
    wanted: str = config.cluster.device
    if wanted == "auto":
        wanted = decided or ("cuda" if torch.cuda.is_available() else "cpu")
    return wanted


def device_of(config: Config, context: Context) -> torch.device:
    """This rank's.

    Raises:
        RuntimeError: it is a GPU, and there is none for this rank; the words are those of torch, and the fault is the node's.
    """
    if kind(config, context.device) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if context.local_rank >= count:
        raise RuntimeError(f"No CUDA GPUs are available for local rank {context.local_rank}: torch sees {count} on this node")
    torch.cuda.set_device(context.local_rank)
    return torch.device("cuda", context.local_rank)


def onto(data: Tensor, device: torch.device) -> Tensor:
    """Data of the CPU on a device. On a GPU the copy runs by itself, out of page-locked memory that torch reuses after it."""
    if device.type != "cuda":
        return data.to(device)
    return data.pin_memory().to(device, non_blocking=True)
