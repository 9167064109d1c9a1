"""What the trainer needs of a GPU beside its computing: which one is whose, copies to it, its time and its memory.

`Cuda` and `Host` measure; `StandIn` is a GPU in the tests of a machine without one, and checks the order of use.
"""

import os
import resource
import time
from typing import Protocol

import torch
import torch.distributed as dist
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


def of_standby() -> torch.device:
    """The GPU of the rank that this process will be; nothing is asked of it yet."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU, as its properties say, without making a context on it."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def make_ready(device: torch.device, dtype: torch.dtype) -> None:
    """Have the context of a GPU, and what cuBLAS sets up for the first product of matrices in this type; waits for it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    square = torch.ones(256, 256, device=device, dtype=dtype)
    if not bool((square @ square == 256).all()):  # which waits
        raise RuntimeError(f"{device} multiplies wrongly")


def connect_alone(device: torch.device) -> None:
    """Have NCCL's library and kernels loaded, by a group of this process alone; waits for it."""
    if device.type != "cuda":
        return
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)  # type: ignore[attr-defined]
    try:
        number = torch.ones((), device=device)
        dist.all_reduce(number)
        if float(number) != 1.0:
            raise RuntimeError(f"{device} adds up wrongly")
    finally:
        dist.destroy_process_group()


def give_back(device: torch.device) -> None:
    """The memory that torch keeps for later, so that the rank that computes there has it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def least_memory(device: torch.device) -> int:
    """Bytes of the GPU that has least, of all ranks, which call this together."""
    found = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def locked(data: Tensor, device: torch.device) -> Tensor:
    """Data of the CPU in memory that is page-locked for a GPU; for the CPU as it is. Any thread may ask."""
    if device.type != "cuda":
        return data
    with torch.cuda.device(device):  # each thread has a device of its own, and would make a context on the first one
        return data.pin_memory()


def onto(data: Tensor, device: torch.device) -> Tensor:
    """Data of the CPU on a device. The copy to a GPU runs by itself, out of memory that is `locked` and reused after it."""
    return data.to(device, non_blocking=True)


class Meter(Protocol):
    """Time and memory of what a rank computes. A GPU works later than it is told to: it passes a mark when it gets there."""

    def mark(self) -> object:
        """The point behind all that the device was told to do so far."""

    def wait(self, mark: object) -> None:
        """Until the device has passed a mark."""

    def seconds(self, first: object, last: object) -> float:
        """Between two marks, both passed."""

    def forget_peak(self) -> None:
        """From here on, `peak_bytes` is that of what follows."""

    def peak_bytes(self) -> int:
        """The most memory in use at once: of a GPU since `forget_peak`; of a process, in its life."""


def meter_of(device: torch.device) -> Meter:
    """That of the device a rank computes on."""
    return Cuda(device) if device.type == "cuda" else Host()


class Host:
    """The CPU, which has done what it was told to."""

    def mark(self) -> object:
        return time.perf_counter()

    def wait(self, mark: object) -> None:
        pass

    def seconds(self, first: object, last: object) -> float:
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first

    def forget_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Cuda:
    """A GPU, by events in its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def seconds(self, first: object, last: object) -> float:
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(last, torch.cuda.Event)
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1000

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class OrderOfUseError(AssertionError):
    """A GPU was used in an order in which it would refuse, or tell what is not so."""


class StandIn:
    """A GPU whose work takes no time of the host's: it runs once it is waited for, on a clock of its own."""

    def __init__(self) -> None:
        self._asked_s = self._done_s = 0.0
        self._marks: list[float] = []
        self._peak = 0

    def launch(self, seconds: float, size_bytes: int = 0) -> None:
        """Have the device do work that takes so long and needs so much memory meanwhile."""
        self._asked_s += seconds
        self._peak = max(self._peak, size_bytes)

    def mark(self) -> object:
        self._marks.append(self._asked_s)
        return len(self._marks) - 1

    def wait(self, mark: object) -> None:
        self._done_s = max(self._done_s, self._at(mark))

    def seconds(self, first: object, last: object) -> float:
        if max(self._at(first), self._at(last)) > self._done_s:
            raise OrderOfUseError("a mark is asked for its time before the device has passed it")
        if self._at(first) > self._at(last):
            raise OrderOfUseError("the first mark is behind the last one")
        return self._at(last) - self._at(first)

    def forget_peak(self) -> None:
        self._peak = 0

    def peak_bytes(self) -> int:
        return self._peak

    def _at(self, mark: object) -> float:
        if not isinstance(mark, int) or not 0 <= mark < len(self._marks):
            raise OrderOfUseError(f"{mark!r} is no mark of this device")
        return self._marks[mark]
