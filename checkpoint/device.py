"""What snapshots need of a GPU: page-locked host memory, and copies into it that run by themselves.

The only module of this package that calls CUDA for snapshots. `Cuda` does it; `StandIn` does the same on tensors of the CPU and
checks the order of use, so that all but the calls themselves is tested without a GPU.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

log = logging.getLogger(__name__)


class Device(Protocol):
    """One GPU, as one rank uses it."""

    def holds(self, data: torch.Tensor) -> bool:
        """Whether a tensor is in its memory."""

    def register(self, address: int, size_bytes: int) -> bool:
        """Page-lock whole pages of this process, so that the GPU copies into them by itself; whether that was granted.

        Once refused, it is refused for good: each further try would cost as much, and copies only take longer without it.
        """

    def unregister(self, address: int) -> None:
        """Give back what was registered from this address on."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin copies to host memory, behind all that was asked of the GPU so far. Until `finish`, targets are nobody's."""

    def finish(self) -> None:
        """Wait until all copies that were begun are there."""


def device_of(data: Sequence[torch.Tensor]) -> "Device | None":
    """The GPU that tensors are on, of which a rank has one; None where all are the CPU's."""
    return next((Cuda(each.device) for each in data if each.is_cuda), None)


class Cuda:
    """A GPU that torch computes on.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._refused = False

    def holds(self, data: torch.Tensor) -> bool:
        return data.is_cuda

    def register(self, address: int, size_bytes: int) -> bool:
        if self._refused:
            return False
        status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))  # type: ignore[no-untyped-call]
        if status == 0:
            return True
        self._refused = True
        log.warning("memory of snapshots cannot be page-locked (CUDA error %d, see ulimit -l): copies take longer", status)
        forget_error(self._device)
        return False

    def unregister(self, address: int) -> None:
        if int(torch.cuda.cudart().cudaHostUnregister(address)):  # type: ignore[no-untyped-call]
            forget_error(self._device)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)

    def finish(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()


def forget_error(device: torch.device) -> None:
    """Take CUDA's last error away, which the next kernel's launch would otherwise be blamed for.

    torch asks for it after each launch, and CUDA forgets it when it is asked.
    """
    try:
        torch.empty(1, device=device).add_(1)
    except RuntimeError as error:
        log.debug("CUDA's last error: %s", error)


class OrderOfUseError(AssertionError):
    """A GPU was used in an order in which it would give wrong bytes, or refuse."""


class StandIn:
    """Tensors of the CPU in place of those of a GPU: copies happen only in `finish`, and what must not be is an error.

    Args:
        owns: whether memory of this process, by address and bytes, may be registered; None: any may.
        grants: how many registrations succeed; None: all.
    """

    def __init__(self, owns: Callable[[int, int], bool] | None = None, grants: int | None = None) -> None:
        self._owns = owns
        self.registered: dict[int, int] = {}
        self.tries = 0
        self._grants = grants
        self._refused = False
        self._begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def holds(self, data: torch.Tensor) -> bool:
        return data.dim() > 0  # as with an optimizer's `step`, which stays on the CPU

    def register(self, address: int, size_bytes: int) -> bool:
        if self._refused:
            return False
        self.tries += 1
        if address % 4096 or size_bytes % 4096 or not size_bytes:
            raise OrderOfUseError(f"{size_bytes} bytes at {address:#x} are not whole pages")
        if self._owns is not None and not self._owns(address, size_bytes):
            raise OrderOfUseError(f"{size_bytes} bytes at {address:#x} are not this rank's own")
        if any(_meet(address, size_bytes, start, size) for start, size in self.registered.items()):
            raise OrderOfUseError(f"of {size_bytes} bytes at {address:#x} some are registered already")
        if self._grants is not None and len(self.registered) >= self._grants:
            self._refused = True
            return False
        self.registered[address] = size_bytes
        return True

    def unregister(self, address: int) -> None:
        if address not in self.registered:
            raise OrderOfUseError(f"nothing is registered at {address:#x}")
        self._in_flight(address, self.registered[address], "given back")
        del self.registered[address]

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._in_flight(target.data_ptr(), _spans(target), "copied to again")
            self._begun.append((target, source))

    def finish(self) -> None:
        for target, source in self._begun:
            target.copy_(source)
        self._begun = []

    def read(self, data: torch.Tensor) -> torch.Tensor:
        """Data of host memory, which is read now."""
        self._in_flight(data.data_ptr(), _spans(data), "read")
        return data

    @property
    def locked(self) -> int:
        """Bytes that are page-locked."""
        return sum(self.registered.values())

    def _in_flight(self, address: int, size_bytes: int, what: str) -> None:
        if any(_meet(address, size_bytes, target.data_ptr(), _spans(target)) for target, _ in self._begun):
            raise OrderOfUseError(f"memory at {address:#x} is {what} before the copies to it are finished")


def _spans(data: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not data.numel():
        return 0
    return (1 + sum((length - 1) * stride for length, stride in zip(data.shape, data.stride(), strict=True))) * data.element_size()


def _meet(first: int, first_bytes: int, second: int, second_bytes: int) -> bool:
    return first < second + second_bytes and second < first + first_bytes
