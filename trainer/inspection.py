"""One step of a rank, looked into by torch's profiler: the most that its tensors take at one time, and how long it communicates.

On the CPU nothing else counts tensors: a process's memory is mostly libraries. The step takes longer for being looked at.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from trainer.local import local
from trainer.model import GPT

Span = tuple[int, int]
"""Begin and end, in ns."""

Allocation = tuple[int, int, int]
"""When in ns; bytes, negative where they are freed; address."""


@dataclass(frozen=True)
class Inspected:
    """What was seen of a step.

    Attributes:
        state_bytes: this rank's weights, gradients and optimizer state, at the step's end.
        tensor_bytes: the most that tensors took at one time.
        step_s: the step took, as it was looked at.
        collective_s: collectives were under way so long, transfers to other stages aside; waiting for others included.
        transfer_s: transfers to and from other stages of the pipeline were.
    """

    state_bytes: int
    tensor_bytes: int
    step_s: float
    collective_s: float
    transfer_s: float


class Inspection:
    """Of one step, from where it is made on."""

    def __init__(self, stages: Sequence[GPT], optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._stages, self._optimizer, self._device = stages, optimizer, device
        self._before = self._state()
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], profile_memory=True)
        self._profile.start()
        self._began = time.perf_counter()

    def end(self) -> Inspected:
        """While the gradients of the step are still there."""
        step_s, state = time.perf_counter() - self._began, self._state()
        self._profile.stop()
        profiled: Any = self._profile.profiler
        seen = profiled.kineto_results
        collectives: list[Span] = []
        transfers: list[Span] = []
        for event in seen.events():
            if (is_transfer := communication(event.name())) is not None:
                began = event.start_ns()
                (transfers if is_transfer else collectives).append((began, began + event.duration_ns()))
        allocations = _allocations(seen.experimental_event_tree(), self._device.type)
        communicating = [under_way_ns(spans) / 1e9 for spans in (collectives, transfers)]
        return Inspected(state, self._before + peak(allocations), step_s, *communicating)

    def _state(self) -> int:
        """Bytes of this rank's shards."""
        parameters = [parameter for stage in self._stages for parameter in stage.parameters()]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [each for state in self._optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
        parts = [local(each) for each in (*parameters, *gradients, *moments)]
        return sum(each.numel() * each.element_size() for each in parts)


def communication(name: str) -> bool | None:
    """Whether an event of the profiler is a transfer from one rank to another, or a collective; None: neither.

    Gloo's events span the operation; those of NCCL are its kernels.
    """
    low = name.lower()
    if low.startswith("gloo:"):
        return low.startswith(("gloo:send", "gloo:recv"))
    return "sendrecv" in low if low.startswith("nccldevkernel") else None


def _allocations(roots: Iterable[Any], device: str) -> Iterator[Allocation]:
    """Those of a device in the profiler's tree of events."""
    left = list(roots)
    while left:
        node = left.pop()
        left += node.children
        kind, fields = node.typed
        if kind == _EventType.Allocation and fields.device.type == device:
            yield node.start_time_ns, fields.alloc_size, fields.ptr


def peak(allocations: Iterable[Allocation]) -> int:
    """The most bytes at one time, beyond those at the beginning.

    What threads of gloo free comes without an event, so that sizes do not add up, nor do the profiler's totals: that it was
    freed is seen once its address is allocated anew.
    """
    there: dict[int, int] = {}
    now = most = 0
    for _, size, address in sorted(allocations):
        now -= there.pop(address, 0)
        if size > 0:
            there[address] = size
            now += size
        most = max(most, now)
    return most


def under_way_ns(spans: Iterable[Span]) -> int:
    """How long at least one of them was."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total
