"""One forward and backward pass over a batch: micro batch by micro batch, or through a pipeline.

Owns the order of the passes. The loss of a batch is the mean over its tokens; each micro batch is weighed so that gradients add up
to that of the whole, whatever the layout.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.experimental import context_parallel

from resilient.worker import Config, reduces_every
from trainer.computing import Computing, computing_of
from trainer.data.bounds import Documents
from trainer.device import locked, onto
from trainer.model import GPT
from trainer.parallel import Ranks, ReducingStage, begin_backward, reshard


@dataclass
class Batch:
    """This rank's part of a global batch, its micro batches one after the other; each (batch, seq), `documents` of as many."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Documents | None = None

    def locked(self, device: torch.device) -> "Batch":
        """The same on the CPU, in memory that is page-locked for a device."""
        return self._with(lambda data: locked(data, device))

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return self._with(lambda data: onto(data, device))

    def _with(self, made: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.positions is None else made(self.positions)
        documents = self.documents
        if documents is not None:
            documents = documents._replace(numbers=made(documents.numbers), starts=made(documents.starts))
        return Batch(made(self.tokens), made(self.targets), positions, documents)


class Engine(Protocol):
    """Both passes, and the forward pass alone. They return the batch's loss: on the ranks that compute it, else 0."""

    def train(self, batch: Batch, counted: Tensor) -> Tensor:
        """Forward and backward: gradients are those of (summed loss × dp) / `counted`, which data parallelism averages.

        Args:
            counted: tokens of the global batch that have a target.
        """
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """The summed loss."""
        ...


class Plain:
    """A model that is whole on this rank (or shared by tensor parallelism).

    Args:
        computing: times its passes.
    """

    def __init__(self, config: Config, model: GPT, ranks: Ranks, computing: Computing | None = None) -> None:
        self._computing = computing
        self._model, self._ranks = model, ranks
        self._micro = config.train.micro_batch_size
        self._every, self._gathered_once = reduces_every(config), config.parallel.zero_stage < 3

    def train(self, batch: Batch, counted: Tensor) -> Tensor:
        parts = list(self._parts(batch))
        weight = self._ranks.shards.size() / counted
        total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        computing = self._computing
        if computing is not None:
            computing.begin(len(parts))
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            begin_backward(self._model, reduce=last or self._every, reshard=last or not self._gathered_once)
            with self._context(part):
                with nullcontext() if computing is None else computing.forward(number):
                    loss: Tensor = self._model(part.tokens, part.positions, part.documents, part.targets)
                with nullcontext() if computing is None else computing.backward(number):
                    torch.autograd.backward(loss * weight)
            total += loss.detach().double()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        for part in self._parts(batch):
            with self._context(part):
                total += self._model(part.tokens, part.positions, part.documents, part.targets).double()
        reshard(self._model)
        return total

    def _parts(self, batch: Batch) -> list[Batch]:
        split = [[None] * len(batch.tokens) if x is None else x.split(self._micro) for x in vars(batch).values()]
        return [Batch(*parts) for parts in zip(*split, strict=False)]

    def _context(self, part: Batch) -> AbstractContextManager[None]:
        if self._ranks.layout.cp == 1:
            return nullcontext()
        # PyTorch's context parallelism cuts these buffers along the sequence and passes keys and values around.
        buffers = [part.tokens, part.targets]
        if part.positions is not None:
            buffers.append(part.positions)
        manager: AbstractContextManager[None] = context_parallel(
            self._ranks.mesh["cp"], buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        )
        return manager


Schedule = PipelineScheduleSingle | PipelineScheduleMulti

_SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


class Pipelined:
    """Stages of a pipeline, by PyTorch's schedules."""

    def __init__(self, config: Config, stages: Sequence[GPT], ranks: Ranks, device: torch.device) -> None:
        self._config, self._stages, self._ranks, self._device = config, stages, ranks, device
        self._weight = torch.ones((), device=device)
        # For each number of micro batches; those that go forward only have buffers of their own.
        self._schedules: dict[tuple[int, bool], tuple[Schedule, list[ReducingStage]]] = {}

    def train(self, batch: Batch, counted: Tensor) -> Tensor:
        self._weight = self._ranks.shards.size() / counted
        losses = self._run(batch, training=True)
        return losses / self._weight.double()

    def evaluate(self, batch: Batch) -> Tensor:
        self._weight = torch.ones((), device=self._device)
        losses = self._run(batch, training=False)
        for stage in self._stages:
            reshard(stage)
        return losses

    def _run(self, batch: Batch, *, training: bool) -> Tensor:
        count = len(batch.tokens) // self._config.train.micro_batch_size
        if (count, training) not in self._schedules:
            self._schedules[count, training] = self._schedule(count)
        schedule, parts = self._schedules[count, training]
        first, last = self._stages[0].stage.first, self._stages[-1].stage.last
        known = {"positions": batch.positions, "documents": batch.documents, "targets": batch.targets if last else None}
        given: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        losses: list[Tensor] = []
        inputs = [batch.tokens] if first else []
        options: dict[str, Any] = {"target": batch.targets, "losses": losses} if last else {}
        if training:
            schedule.step(*inputs, return_outputs=False, **options, **given)
            for part in parts:
                part.finish()
        else:
            schedule.eval(*inputs, return_outputs=False, **options, **given)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach().double()
        return total

    def _schedule(self, count: int) -> tuple[Schedule, list[ReducingStage]]:
        group = self._ranks.mesh.get_group("pp")
        parts = [ReducingStage(each, self._device, group, every=reduces_every(self._config)) for each in self._stages]
        kind = _SCHEDULES[self._config.parallel.schedule]
        several = issubclass(kind, PipelineScheduleMulti)
        made = kind(parts if several else parts[0], count, loss_fn=self._weighted, scale_grads=False)  # type: ignore[arg-type]
        return made, parts

    def _weighted(self, loss: Tensor, _targets: Tensor) -> Tensor:
        return loss * self._weight


def make_engine(config: Config, stages: Sequence[GPT], ranks: Ranks, device: torch.device) -> Engine:
    """The engine for a layout."""
    if ranks.layout.pp == 1:
        return Plain(config, stages[0], ranks, computing_of(config, ranks.layout, device))
    return Pipelined(config, stages, ranks, device)
