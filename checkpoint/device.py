"""What snapshots need of a GPU: page-locked host memory, and copies to and from it that run by themselves.

The only module of this package that calls CUDA for snapshots. `Cuda` does it; `StandIn` does the same on tensors of the CPU and
checks the order of use, so that all but the calls themselves is tested without a GPU.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from checkpoint import recordings
from checkpoint.rounds import STAGE_BYTES

log = logging.getLogger(__name__)

_HOLDS = 64  # whose time is kept until somebody asks


class Device(Protocol):
    """One GPU, as one rank uses it."""

    def holds(self, data: torch.Tensor) -> bool:
        """Whether a tensor is in its memory."""

    def register(self, address: int, size_bytes: int) -> bool:
        """Page-lock whole pages of this process, so that the GPU copies to and from them by itself; whether that was granted.

        Once refused, it is refused for good: each further try would cost as much, and copies only take longer without it. That a
        graph was recorded meanwhile is no refusal.
        """

    def unregister(self, address: int) -> None:
        """Give back what was registered from this address on."""

    def stage(self) -> torch.Tensor:
        """Bytes of its memory in which copies to the host are gathered, the same each time; empty where there was no room."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin copies to or from host memory, or into the stage, behind all that was asked of the GPU so far, copies among it.

        They run beside what it is asked next.
        Targets are nobody's until a mark behind them is waited for. Sources must not change before the GPU is held back for one.
        """

    def unpack(
        self, host: torch.Tensor, stage: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Begin a copy of host memory into a piece of the stage, and behind it copies from there; otherwise like `copy`."""

    def mark(self) -> object:
        """The point behind all copies that were begun so far."""

    def hold_back(self, mark: object) -> None:
        """Have the GPU begin what it is asked from now on only once it has passed a mark. Nothing of the host waits."""

    def recording(self) -> bool:
        """Whether what it is asked now is recorded, to be replayed later; all that it was asked before has been done."""

    def beside_recordings(self) -> None:
        """Calls of this thread neither fail nor spoil what another one records from now on: they are no part of a graph."""

    def wait(self, mark: object) -> None:
        """Until the GPU has passed a mark, without using a core; any thread may. Raises RuntimeError where the GPU has failed."""

    def held_s(self) -> float:
        """Seconds for which the GPU was held back since this was last asked; waits until it has gone on."""


def device_of(data: Sequence[torch.Tensor]) -> "Device | None":
    """The GPU that tensors are on, of which a rank has one, with a stream for copies; None where all are the CPU's."""
    return next((Cuda(each.device) for each in data if each.is_cuda), None)


class Cuda:
    """A GPU that torch computes on.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._refused = False
        self._copying: torch.cuda.Stream | None = None
        self._stage: torch.Tensor | None = None
        self._holds: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_HOLDS)

    def holds(self, data: torch.Tensor) -> bool:
        return data.is_cuda

    def register(self, address: int, size_bytes: int) -> bool:
        if self._refused:
            return False
        with torch.cuda.device(self._device):  # each thread has a device of its own, and would make a context on the first one
            status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))  # type: ignore[no-untyped-call]
        if status == 0:
            return True
        if status == recordings.FORBIDDEN:
            log.warning("memory of snapshots was not page-locked, as a CUDA graph was recorded: copies to that buffer take longer")
        else:
            self._refused = True
            log.warning("memory of snapshots cannot be page-locked (CUDA error %d, see ulimit -l): copies take longer", status)
        forget_error(self._device)
        return False

    def stage(self) -> torch.Tensor:
        if self._stage is None:
            try:
                self._stage = torch.empty(STAGE_BYTES, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                log.warning("no memory of the GPU is left to gather copies of snapshots in: each chunk is a copy of its own")
                self._stage = torch.empty(0, dtype=torch.uint8, device=self._device)
        return self._stage

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            status = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
        if status:
            forget_error(self._device)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        stream = self._stream()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for some_targets, some_sources in at_once(targets, sources):
                torch._foreach_copy_(some_targets, some_sources, non_blocking=True)

    def unpack(
        self, host: torch.Tensor, stage: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        stream = self._stream()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            stage.copy_(host, non_blocking=True)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def mark(self) -> object:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
        event.record(self._stream())
        return event

    def hold_back(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        stream = torch.cuda.current_stream(self._device)
        before, behind = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record(stream)
        stream.wait_event(mark)
        behind.record(stream)
        self._holds.append((before, behind))

    def recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def beside_recordings(self) -> None:
        recordings.work_beside()

    def wait(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def held_s(self) -> float:
        milliseconds = 0.0
        while self._holds:
            before, behind = self._holds.popleft()
            behind.synchronize()
            milliseconds += before.elapsed_time(behind)
        return milliseconds / 1000

    def _stream(self) -> torch.cuda.Stream:
        """On which copies run, one behind the other."""
        if self._copying is None:
            # Before others where a processor of the GPU is free: what is packed takes little, and the bus waits for it.
            self._copying = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        return self._copying


def at_once(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> Iterable[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Copies by groups: rows of one type are made by few kernels of a GPU, where nothing else is among them."""
    groups: dict[torch.dtype | None, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        row = target.dim() == source.dim() == 1 and target.stride() == source.stride() == (1,)
        group = groups.setdefault(target.dtype if row else None, ([], []))
        group[0].append(target)
        group[1].append(source)
    return groups.values()


def forget_error(device: torch.device) -> None:
    """Take CUDA's last error away, which the next kernel's launch would otherwise be blamed for.

    torch asks for it after each launch, and CUDA forgets it when it is asked.
    """
    try:
        torch.empty(1, device=device).add_(1)
    except RuntimeError as error:
        log.debug("CUDA's last error: %s", error)


class OrderOfUseError(RuntimeError):
    """A GPU was used in an order in which it would give wrong bytes, or refuse."""


@dataclass(eq=False)
class _Begun:
    """A copy that a stand-in has begun.

    Attributes:
        before: bytes of the source when it was begun; None: it is from the stage, and has what copies before it put there.
        held: work that follows is held back for it, so that the source may change.
    """

    target: torch.Tensor
    source: torch.Tensor
    before: torch.Tensor | None
    held: bool = False


class StandIn:
    """Tensors of the CPU in place of those of a GPU: copies happen only when they are waited for; what must not be is an error.

    Args:
        owns: whether memory of this process, by address and bytes, may be registered; None: any may.
        grants: how many registrations succeed; None: all.
        stage_bytes: of the stage, whose bytes are of no account until something is copied there.

    Attributes:
        crossings: copies between host and GPU that were begun.
        moving: while it is cleared copies stand still, and who waits for them waits.
        fails: who waits gets an error.
        records: what is asked is recorded, to be replayed later.
    """

    def __init__(
        self, owns: Callable[[int, int], bool] | None = None, grants: int | None = None, stage_bytes: int = 1 << 20
    ) -> None:
        self._owns = owns
        self.registered: dict[int, int] = {}
        self.tries = 0
        self._grants = grants
        self._refused = False
        self._begun: list[_Begun] = []
        self._arrived = 0  # copies that are not in `_begun` any more
        self._lock = threading.Lock()
        self.moving = threading.Event()
        self.moving.set()
        self.fails = self.records = False
        self._thread = threading.local()  # `beside`: it may do what spoils a recording
        self._allocated = False
        self._stage = torch.full((stage_bytes,), 0xA5, dtype=torch.uint8)
        self.crossings = 0
        self.held_back_s = 0.0  # what `held_s` will tell

    def holds(self, data: torch.Tensor) -> bool:
        return data.dim() > 0  # as with an optimizer's `step`, which stays on the CPU

    def register(self, address: int, size_bytes: int) -> bool:
        if self._refused:
            return False
        self.tries += 1
        self._spoils("page-locked")
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
            staged = self._staged(target)
            if not staged:  # where copies run one behind the other
                self._in_flight(target.data_ptr(), _spans(target), "copied to again")
                self.crossings += 1
            with self._lock:
                self._begun.append(_Begun(target, source, None if self._staged(source) else _bytes(source)))

    def unpack(
        self, host: torch.Tensor, stage: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        if not self._staged(stage):
            raise OrderOfUseError(f"memory at {stage.data_ptr():#x} is not of the stage")
        self.copy([stage], [host])
        self.copy(targets, sources)

    def stage(self) -> torch.Tensor:
        if not self._allocated:
            self._spoils("allocated")
            self._allocated = True
        return self._stage

    def _spoils(self, what: str) -> None:
        if self.records and not getattr(self._thread, "beside", False):
            raise OrderOfUseError(f"memory is {what} while a graph is recorded, which CUDA gives up then")

    def _staged(self, data: torch.Tensor) -> bool:
        return _meet(data.data_ptr(), _spans(data), self._stage.data_ptr(), self._stage.nbytes)

    def mark(self) -> object:
        with self._lock:
            return self._arrived + len(self._begun)

    def hold_back(self, mark: object) -> None:
        with self._lock:
            for copy in self._before(mark):
                self._unchanged(copy)
                copy.held = True

    def recording(self) -> bool:
        return self.records

    def beside_recordings(self) -> None:
        self._thread.beside = True

    def wait(self, mark: object) -> None:
        self.moving.wait()
        with self._lock:
            arrived = self._before(mark)
            self._begun = self._begun[len(arrived) :]
            self._arrived += len(arrived)
            if self.fails:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            for copy in arrived:
                self._unchanged(copy)
                there = _bytes(copy.source) if copy.before is None else copy.before
                copy.target.copy_(there.view(copy.source.dtype).view(copy.source.shape))

    def held_s(self) -> float:
        held_s, self.held_back_s = self.held_back_s, 0.0
        return held_s

    def _before(self, mark: object) -> list[_Begun]:
        """Copies before a mark that have not arrived."""
        if not isinstance(mark, int) or not 0 <= mark <= self._arrived + len(self._begun):
            raise OrderOfUseError(f"{mark!r} is no mark of this device")
        return self._begun[: max(0, mark - self._arrived)]

    def _unchanged(self, copy: _Begun) -> None:
        if copy.before is not None and not copy.held and not torch.equal(copy.before, _bytes(copy.source)):
            raise OrderOfUseError("a tensor has changed before its copy was there: the work that changes it was not held back")

    def read(self, data: torch.Tensor) -> torch.Tensor:
        """Data of host memory, which is read now."""
        self._in_flight(data.data_ptr(), _spans(data), "read")
        return data

    @property
    def locked(self) -> int:
        """Bytes that are page-locked."""
        return sum(self.registered.values())

    def _in_flight(self, address: int, size_bytes: int, what: str) -> None:
        with self._lock:
            meets = any(_meet(address, size_bytes, copy.target.data_ptr(), _spans(copy.target)) for copy in self._begun)
        if meets:
            raise OrderOfUseError(f"memory at {address:#x} is {what} before the copies to it are finished")


def _bytes(data: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes, in a row."""
    return data.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _spans(data: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not data.numel():
        return 0
    return (1 + sum((length - 1) * stride for length, stride in zip(data.shape, data.stride(), strict=True))) * data.element_size()


def _meet(first: int, first_bytes: int, second: int, second_bytes: int) -> bool:
    return first < second + second_bytes and second < first + first_bytes
