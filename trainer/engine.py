"""One forward and backward pass over a batch: micro batch by micro batch, or through a pipeline.

Owns the order of the passes. The loss of a batch is the mean over its tokens; each micro batch is weighed so that gradients add up
to that of the whole, whatever the layout.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel

from resilient.worker import Config, reduces_every
from trainer.data.bounds import Documents
from trainer.device import onto
from trainer.model import GPT
from trainer.parallel import Ranks, ReducingStage, begin_backward, reshard

IGNORED = -100  # as a target: predicting this token costs nothing


@dataclass
class Batch:
    """This rank's part of a global batch, its micro batches one after the other; each (batch, seq), `documents` of as many."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Documents | None = None

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        positions = None if self.positions is None else onto(self.positions, device)
        documents = self.documents
        if documents is not None:
            documents = documents._replace(numbers=onto(documents.numbers, device), starts=onto(documents.starts, device))
        return Batch(onto(self.tokens, device), onto(self.targets, device), positions, documents)


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


class Loss:
    """Summed cross entropy of a micro batch, of logits that are cut along the vocabulary where there is tensor parallelism."""

    def __init__(self, ranks: Ranks, vocab: int) -> None:
        self._mesh = ranks.tensor if ranks.layout.tp > 1 else None
        self._vocab = vocab

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (batch, seq, this rank's vocabulary), targets (batch, seq)."""
        logits, targets = logits.float().flatten(0, 1), targets.flatten()
        if self._mesh is None:
            return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        whole = torch.Size((len(targets), self._vocab))
        cut = DTensor.from_local(logits, self._mesh, [Shard(1)], run_check=False, shape=whole, stride=(self._vocab, 1))
        loss = F.cross_entropy(cut, targets, reduction="sum", ignore_index=IGNORED)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def context(self) -> AbstractContextManager[None]:
        """Both passes run in it."""
        return nullcontext() if self._mesh is None else loss_parallel()


class Plain:
    """A model that is whole on this rank (or shared by tensor parallelism)."""

    def __init__(self, config: Config, model: GPT, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._micro = config.train.micro_batch_size
        self._every, self._gathered_once = reduces_every(config), config.parallel.zero_stage < 3
        self._loss = Loss(ranks, model.shape.vocab)

    def train(self, batch: Batch, counted: Tensor) -> Tensor:
        parts = list(self._parts(batch))
        weight = self._ranks.shards.size() / counted
        total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            begin_backward(self._model, reduce=last or self._every, reshard=last or not self._gathered_once)
            with self._context(part), self._loss.context():
                loss = self._loss(self._model(part.tokens, part.positions, part.documents), part.targets)
                torch.autograd.backward(loss * weight)
            total += loss.detach().double()
        return total

    def evaluate(self, batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
        for part in self._parts(batch):
            with self._context(part), self._loss.context():
                total += self._loss(self._model(part.tokens, part.positions, part.documents), part.targets).double()
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
        self._loss = Loss(ranks, stages[0].shape.vocab)
        self._weight = torch.ones((), device=device)
        # For each number of micro batches; those that go forward only have buffers of their own.
        self._schedules: dict[tuple[int, bool], PipelineScheduleSingle | PipelineScheduleMulti] = {}

    def train(self, batch: Batch, counted: Tensor) -> Tensor:
        self._weight = self._ranks.shards.size() / counted
        with self._loss.context():
            losses = self._run(batch, training=True)
        return losses / self._weight.double()

    def evaluate(self, batch: Batch) -> Tensor:
        self._weight = torch.ones((), device=self._device)
        with self._loss.context():
            losses = self._run(batch, training=False)
        for stage in self._stages:
            reshard(stage)
        return losses

    def _run(self, batch: Batch, *, training: bool) -> Tensor:
        count = len(batch.tokens) // self._config.train.micro_batch_size
        if (count, training) not in self._schedules:
            self._schedules[count, training] = self._schedule(count)
        schedule = self._schedules[count, training]
        first, last = self._stages[0].stage.first, self._stages[-1].stage.last
        known = {"positions": batch.positions, "documents": batch.documents}
        given: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        losses: list[Tensor] = []
        inputs = [batch.tokens] if first else []
        options: dict[str, Any] = {"target": batch.targets, "losses": losses} if last else {}
        if training:
            schedule.step(*inputs, return_outputs=False, **options, **given)
        else:
            schedule.eval(*inputs, **options, **given)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach().double()
        return total

    def _schedule(self, count: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        group = self._ranks.mesh.get_group("pp")
        part = ReducingStage if reduces_every(self._config) else PipelineStage
        parts = [part(each, each.stage.index, each.stage.count, self._device, group=group) for each in self._stages]
        kind = _SCHEDULES[self._config.parallel.schedule]
        several = issubclass(kind, PipelineScheduleMulti)
        return kind(parts if several else parts[0], count, loss_fn=self._weighted, scale_grads=False)  # type: ignore[arg-type]

    def _weighted(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self._loss(logits, targets) * self._weight


def make_engine(config: Config, stages: Sequence[GPT], ranks: Ranks, device: torch.device) -> Engine:
    """The engine for a layout."""
    if ranks.layout.pp == 1:
        return Plain(config, stages[0], ranks)
    return Pipelined(config, stages, ranks, device)
