"""Modules and callbacks of Lightning with hooks for checkpoints, and fits with them; imported only by what uses them."""

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EMAWeightAveraging, Timer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resilient.integrations import lightning_hooks
from resilient.integrations.lightning_state import Rest
from resilient.state.documents import Documents
from resilient.state.position import Position

ORDER: list[str] = []  # of hooks that were called with a checkpoint to load


class Line(pl.LightningModule):
    """One layer; what it has seen is in checkpoints by its hook alone."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 4})
        self.layer = torch.nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        self.seen += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["hyper_parameters"] == {"width": 4}
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        ORDER.append("module")
        self.seen = checkpoint["seen"]


class Plain(pl.LightningModule):
    """Without a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    training_step = Line.training_step
    configure_optimizers = Line.configure_optimizers
    seen = 0


class Counting(Callback):
    """Keeps a count by a hook."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"], checkpoint["best"] = self.count, None

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        ORDER.append("callback")
        self.count, _ = checkpoint["count"], checkpoint["best"]


class Own(Callback):
    """Takes the place of the runtime's: does something within the fit, and its own hook is called by nobody."""

    def __init__(self, at: int, act: Callable[[pl.Trainer], None]) -> None:
        self.at, self.act = at, act

    def on_train_batch_start(self, trainer: pl.Trainer, _: pl.LightningModule, __: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.act(trainer)

    def on_save_checkpoint(self, *_: Any) -> None:
        pytest.fail("the hook of the callback that takes the snapshot")


def fit(module: pl.LightningModule, directory: Path, *callbacks: Callback, steps: int, distributed: bool = False) -> None:
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(40, 4))
    sampler = DistributedSampler(dataset, 1, 0, shuffle=False) if distributed else None
    data = DataLoader(dataset, batch_size=4, sampler=sampler)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(max_steps=steps, accelerator="cpu", devices=1, default_root_dir=directory, callbacks=[*callbacks], **quiet)
    trainer.fit(module, data)


def average(callback: EMAWeightAveraging) -> dict[str, torch.Tensor]:
    assert callback._average_model is not None
    return {name: value.clone() for name, value in callback._average_model.state_dict().items()}


def saved_at(directory: Path, step: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What hooks add at a step, the weights there, and their average."""
    found: list[Any] = []
    ema = EMAWeightAveraging(decay=0.5)

    def take(trainer: pl.Trainer) -> None:
        weights = {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}
        state = lightning_hooks.saved(trainer, trainer.fit_loop.state_dict(), own)
        found.extend([deepcopy(state), weights, average(ema)])  # as a snapshot has them: training goes on in place

    own = Own(step, take)
    fit(Line(), directory, Counting(), ema, own, steps=step + 1)
    state, weights, averaged = found
    return state, weights, averaged


ROOM = 1 << 16


def documents(rest: Rest) -> Documents:
    """As those of a rank that is attached, with nothing else in them."""
    return Documents(modules=[], all_optimizers=[], schedulers=[], extra={"lightning": rest}, position=Position(None))


def documents_at(directory: Path, step: int, ranks: int) -> torch.Tensor:
    """The rows of so many ranks at a step, each with random numbers and a clock of its own."""
    rows: list[torch.Tensor] = []

    def take(trainer: pl.Trainer) -> None:
        found = documents(Rest(trainer, own))
        found.set_capacity(ROOM)
        rows.append(found.local_shard(found.capture().replace(b'"ranks":1', f'"ranks":{ranks}'.encode()), 0, 1).data[0].clone())

    for rank in range(ranks):
        random.seed(rank)
        own = Own(step, take)
        fit(Plain(), directory, Timer(), own, steps=step + 1)
    return torch.stack(rows)


class GoingOn(Callback):
    """Goes on from documents as the runtime's callback does, and notes the batches that there are then."""

    def __init__(self, rows: torch.Tensor, *, same: bool) -> None:
        self.rows, self.same = rows, same
        self.batches: list[torch.Tensor] = []

    def on_fit_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.rest = Rest(trainer, self)
        documents(self.rest).restore(self.rows, 1, same=self.same)
        self.rest.begin()

    def on_train_start(self, *_: Any) -> None:
        self.rest.go_to_batch()

    def on_train_batch_start(self, trainer: pl.Trainer, _: pl.LightningModule, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.rest.first_step()
        self.batches.append(batch[0])


def batches_after(directory: Path, rows: torch.Tensor, *, same: bool, distributed: bool) -> list[torch.Tensor]:
    """Those of the rest of an epoch of ten, by one rank."""
    going_on = GoingOn(rows, same=same)
    fit(Plain(), directory, Timer(), going_on, steps=20, distributed=distributed)
    return going_on.batches
