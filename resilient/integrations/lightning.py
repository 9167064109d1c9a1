"""Lightning's Trainer: a snapshot after every step, from which it goes on in the middle of an epoch; stops, phases and metrics.

    trainer = Trainer(..., callbacks=[ResilientCallback(), ModelCheckpoint(...)])
    trainer.fit(module, loader, ckpt_path=newest_checkpoint_of_its_own_or_None)

What the Trainer keeps beside model and optimizers is `lightning_state`. A snapshot is taken when the next batch is
there: what Lightning does after a step (validation, the end of an epoch) is done then.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if "lightning.pytorch" in sys.modules:  # the same under another name; a script imports one of them
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
else:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint, StochasticWeightAveraging

import resilient
from resilient import clock, worker
from resilient.integrations.lightning_state import Rest
from resilient.script.stop import Stopped


class ResilientCallback(Callback):  # type: ignore[misc]
    """One per Trainer, on all ranks alike; without a supervisor it does nothing.

    Raises ValueError where a strategy shards the model (FSDP, DeepSpeed, ModelParallelStrategy), or a step fetches its own batches.
    """

    def __init__(self) -> None:
        self._attached: resilient.Attached | None = None
        self._rest: Rest | None = None
        self._training = False
        self._line: dict[str, Any] | None = None  # the metrics of a step that is not finished
        self._stepped_t: float | None = None
        self._step = 0  # of the Trainer
        self._between = False  # a batch is there that no step has seen

    # -- what the Trainer calls ----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Model and optimizers are there, and the model of a checkpoint that the Trainer was given is read."""
        strategy = trainer.strategy
        if strategy.restore_checkpoint_after_setup:
            raise ValueError(f"ResilientCallback keeps no snapshots of a model that {type(strategy).__name__} shards: leave it out")
        if "dataloader_iter" in pl_module.training_step.__code__.co_varnames:
            raise ValueError("ResilientCallback keeps no snapshots where training_step takes dataloader_iter: leave it out")
        given = trainer._checkpoint_connector._loaded_checkpoint
        self._rest = rest = Rest(trainer, self)
        self._attached = None  # that of a fit which has failed is in use no more
        self._attached = resilient.attach(model=strategy.model, optimizer=trainer.optimizers, extra={"lightning": rest})
        if rest.loaded is None:
            return
        if self._attached.from_cache or self._attached.step >= given.get("global_step", 0):
            given.clear()
            rest.begin()
        else:
            rest.loaded = None
            self._attached.begin()  # its random numbers are not these
            trainer._checkpoint_connector.restore_model()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._rest is not None
        self._step = trainer.global_step
        if self._rest.loaded is not None:
            self._rest.go_to_batch()
        self._training = True
        worker.infer("step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch and self._rest is not None:  # the first one's iterator is there
            self._rest.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch is there."""
        assert self._attached is not None and self._rest is not None
        self._between = True
        first = self._rest.loaded is not None or not self._attached.step
        if self._rest.loaded is not None:
            self._begin_averaging(trainer)
        self._rest.first_step()
        if (self._finish() or first) and self._attached.should_stop() is not None:
            self._save(trainer)
            raise Stopped(0)
        self._between = False
        self._attached.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._attached is not None and self._rest is not None
        if trainer.global_step > self._step:  # else gradients are accumulated
            self._step = trainer.global_step
            self._rest.note_loaders()
            self._line = {"step": self._step, **self._metrics(trainer, outputs)}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training:
            worker.infer("eval")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training:
            worker.infer("step")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._between and self._rest is not None:  # the batch that is there is not done
            checkpoint["loops"]["fit_loop"] = self._rest.fit_loop(with_loaders=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is saved, with what follows from it."""
        assert self._attached is not None and self._rest is not None
        batches = trainer.fit_loop.epoch_loop.batch_progress
        self._rest.ended = batches.is_last_batch or batches.current.ready == trainer.num_training_batches
        if self._rest.ended:
            self._rest.begin_epoch()
        self._finish()
        self._training = False
        self._attached.close()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _metrics(self, trainer: Trainer, outputs: Any) -> dict[str, float]:
        now, before_t = clock.now(), self._stepped_t
        self._stepped_t = now
        found = {"step_s": now - before_t} if before_t else {}
        if trainer.is_global_zero and trainer.log_every_n_steps and not trainer.global_step % trainer.log_every_n_steps:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if loss is not None:
                found["loss"] = float(loss)
            found["lr"] = float(trainer.optimizers[0].param_groups[0]["lr"])
        return found

    def _finish(self) -> bool:
        """Tell of the step that is done, if that was not told; beat, and take a snapshot. Whether there was one."""
        line, self._line = self._line, None
        if line is None or self._attached is None:
            return False
        if self._attached.context.rank == 0:
            worker.report(line)  # first: a step that has a snapshot is not computed again
        self._attached.after_step(line["step"])
        return True

    def _begin_averaging(self, trainer: Trainer) -> None:
        """StochasticWeightAveraging changes the schedule where an epoch starts; Lightning tells it of none in the middle of one."""
        for each in trainer.callbacks:
            if isinstance(each, StochasticWeightAveraging) and each._scheduler_state is not None and not each._initialized:
                each.on_train_epoch_start(trainer, trainer.lightning_module)

    def _save(self, trainer: Trainer) -> None:
        """The Trainer's own checkpoint of a stop, where `ckpt_path="last"` finds it."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                path = Path(callback.format_checkpoint_name({}, callback.CHECKPOINT_NAME_LAST))
                if trainer.is_global_zero and path.is_symlink():
                    path.unlink()  # to another one
                trainer.save_checkpoint(path)
                return
