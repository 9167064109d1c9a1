"""Loops of the runtime's own, each in a process of its own: in which phases a rank is seen to be, and who has said so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import resilient
from resilient import worker
from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.worker_side import WorkerRegion
from resilient.script.progress import observe

Look = Callable[[str], None]
STEPS = 4


class Seen:
    """The phases that an agent sees, by where the script is then; one that the script has told has `told` before it."""

    def __init__(self, folder: Path) -> None:
        self._agent = AgentRegion(folder / "region")
        worker._region = WorkerRegion(folder / "region")
        worker.init()
        worker._progress = observe(worker._region, rank=1, on_stop="callback")
        self.phases: dict[str, set[str]] = {}

    def __call__(self, where: str) -> None:
        activity = self._agent.activity()
        self.phases.setdefault(where, set()).add(activity.phase if activity.inferred else f"told {activity.phase}")


class Samples(Dataset[torch.Tensor]):
    def __init__(self, look: Look, where: str) -> None:
        self._look, self._where = look, where

    def __len__(self) -> int:
        return 2 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self._look(self._where)
        return torch.ones(4)


class Damaged(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        raise OSError


class Watching:
    """Looks when it is saved."""

    def __init__(self, look: Look, where: str) -> None:
        self._look, self._where = look, where

    def __getstate__(self) -> dict[str, Any]:
        self._look(self._where)
        return {}


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


def turned(look: Look, folder: Path) -> None:
    """A loop over `steps`."""
    model, optimizer = made()
    snapshots = resilient.attach(model=model, optimizer=optimizer)
    batches = iter(DataLoader(Samples(look, "reads")))
    for _ in snapshots.steps(STEPS):
        look("computes")
        model(next(batches)).sum().backward()
        optimizer.step()
        torch.save(Watching(look, "saves"), folder / "own.pt")
        with worker.phase("eval"):
            look("says that it evaluates")
            next(batches)
            torch.save(Watching(look, "saves in an evaluation"), folder / "own.pt")
        look("goes on")
    look("is done")
    torch.save(Watching(look, "saves at the end"), folder / "own.pt")


def caught(look: Look, folder: Path) -> None:
    """What is raised in a phase that the script tells, the script catches."""
    model, optimizer = made()
    snapshots = resilient.attach(model=model, optimizer=optimizer)
    for step in snapshots.steps(STEPS):
        look("computes")
        try:
            with worker.phase("data"):
                look("reads")
                if step % 2:
                    raise StopIteration
        except StopIteration:
            with worker.phase("eval"):
                look("evaluates")
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    look("is done")


def read_in_vain(look: Look, folder: Path) -> None:
    """What a loader raises in the body of the loop is caught behind it."""
    model, optimizer = made()
    snapshots = resilient.attach(model=model, optimizer=optimizer)
    try:
        for _ in snapshots.steps(STEPS):
            next(iter(DataLoader(Damaged())))
    except OSError:
        pass
    look("is done")
    next(iter(DataLoader(Samples(look, "reads behind it"))))
    look("goes on")


def in_words(look: Look, _: Path) -> None:
    """A loop that cannot be turned round."""
    model, optimizer = made()
    snapshots = resilient.attach(model=model, optimizer=optimizer)
    while snapshots.step < STEPS and not snapshots.should_stop():
        look("computes")
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        snapshots.after_step()
        look("goes on")
    snapshots.close()
    look("is done")


def left(look: Look, _: Path) -> None:
    """A loop that is left early, and one after it."""
    model, optimizer = made()
    snapshots = resilient.attach(model=model, optimizer=optimizer)
    for _step in snapshots.steps(STEPS):
        look("computes")
        if snapshots.step == 2:
            break
    look("is done")
    for _step in snapshots.steps(STEPS):
        look("computes again")
    look("is done")


def fails(look: Look, _: Path) -> None:
    """A loop that an exception of its body ends, and one that is left before it comes to one."""
    model, optimizer = made()
    snapshots = resilient.attach(model=model, optimizer=optimizer)
    try:
        for _step in snapshots.steps(STEPS):
            raise ValueError("a bad sample")
    except ValueError as error:
        worker.failed(error)
    look("has failed in a step")
    try:
        for _step in snapshots.steps(STEPS):
            break
        raise ValueError("a bad evaluation")
    except ValueError as error:
        worker.failed(error)
    look("has failed behind the loop")


def accelerated(look: Look, _: Path) -> None:
    from accelerate import Accelerator

    from resilient.integrations.accelerate import Snapshots

    accelerator = Accelerator(cpu=True)
    model, optimizer = made()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(look, "reads"), batch_size=2))
    snapshots = Snapshots(accelerator, model=model, optimizer=optimizer, loader=loader)
    for features in snapshots.batches(STEPS):
        look("computes")
        accelerator.backward(model(features).sum())
        optimizer.step()
        if snapshots.step == 2:
            break
    look("is done")


def trained(look: Look, folder: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from resilient.integrations.transformers import ResilientCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            look("computes" if self.training else "evaluates" if trainer.state.global_step < STEPS else "evaluates at the end")
            return {"loss": self.layer(x).sum(), "logits": x}

    class Rows(Samples):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)}

    words = {"max_steps": STEPS, "eval_steps": 2, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    arguments = TrainingArguments(str(folder / "out"), eval_strategy="steps", report_to="none", use_cpu=True, **words)
    callback = ResilientCallback()
    data = {"train_dataset": Rows(look, "reads"), "eval_dataset": Rows(look, "reads to evaluate")}
    trainer = Trainer(Model(), arguments, callbacks=[callback], **data)
    state = trainer._save_optimizer_and_scheduler
    trainer._save_optimizer_and_scheduler = lambda path: (look("saves"), state(path))
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    look("is done")
    trainer.eval_dataset = Rows(look, "reads at the end")
    trainer.evaluate()
    look("is done")


def fitted(look: Look, folder: Path) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    from resilient.integrations.lightning import ResilientCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            look("computes")
            return self.layer(batch).sum()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            if not trainer.sanity_checking:
                look("evaluates" if trainer.state.fn == "fit" else "evaluates at the end")

        def on_train_epoch_end(self) -> None:
            look("ends an epoch")

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["watching"] = Watching(look, "saves")

        def test_step(self, batch: torch.Tensor, _: int) -> None:
            look("tests")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        val_check_interval=2,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=[ResilientCallback(), ModelCheckpoint(folder, every_n_train_steps=2)],
    )
    module = Module()
    data = DataLoader(Samples(look, "reads"), batch_size=2), DataLoader(Samples(lambda where: None, ""), batch_size=2)
    trainer.fit(module, *data)
    look("is done")
    trainer.test(module, data[1], verbose=False)
    trainer.validate(module, data[1], verbose=False)
    look("is done")


def told(loop: Callable[[Look, Path], None], folder: Path) -> None:
    """Run it, and write down the phases."""
    seen = Seen(folder)
    loop(seen, folder)
    (folder / "phases.json").write_text(json.dumps({where: sorted(phases) for where, phases in seen.phases.items()}))
