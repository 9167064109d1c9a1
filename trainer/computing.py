"""How long this rank's GPU computes, without what it waits for others: told to the runtime, which finds slow GPUs by it.

Between two marks in the stream that computes lies all that the GPU did there, waiting for collectives too. So marks are set around
passes in which nothing is exchanged: where parameters are put together once a step, that is the forward pass of each micro batch
but the first, and where gradients are reduced once a step, the backward pass of each but the last. Where there is no such pass,
nothing is told; and nothing is waited for, as the time of a step is told with the next one, when it is known anyway.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from resilient import worker
from resilient.worker import Config, Layout, reduces_every
from trainer.device import Meter, meter_of


class Computing:
    """The passes of one rank over its micro batches.

    Args:
        meter: of the GPU.
        report: takes the seconds of a step.
    """

    def __init__(self, meter: Meter, report: Callable[[float], None] = worker.computed) -> None:
        self._meter, self._report = meter, report
        self._spans: list[tuple[object, object]] = []  # marks before and behind passes
        self._count = 0

    def begin(self, count: int) -> None:
        """A step of so many micro batches begins; the one before is over, and is told of."""
        if self._spans:
            self._meter.wait(self._spans[-1][1])
            seconds = sum(self._meter.seconds(before, behind) for before, behind in self._spans)
            self._report(seconds * self._count / (self._count - 1))  # of each pass, one lies between exchanges and is not in it
        self._spans, self._count = [], count

    @contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """Of the micro batch with this number."""
        before = self._meter.mark() if number > 0 else None
        yield
        self._end(before)

    @contextmanager
    def backward(self, number: int) -> Iterator[None]:
        """Of the micro batch with this number."""
        before = self._meter.mark() if number < self._count - 1 else None
        yield
        self._end(before)

    def _end(self, before: object | None) -> None:
        if before is not None:
            self._spans.append((before, self._meter.mark()))


def computing_of(config: Config, layout: Layout, device: torch.device, meter: Meter | None = None) -> Computing | None:
    """That of a rank; None where its passes are full of exchanges, or it computes on a CPU, whose kernel knows better.

    Args:
        meter: None: what the device has.
    """
    exchanges = layout.tp > 1 or layout.cp > 1 or layout.pp > 1 or config.parallel.zero_stage == 3 or reduces_every(config)
    return None if device.type != "cuda" or exchanges else Computing(meter or meter_of(device))
