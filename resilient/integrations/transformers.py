"""transformers' Trainer: a snapshot after every step, from which it goes on in the middle of an epoch; stops, phases and metrics.

    callback = ResilientCallback()
    trainer = Trainer(..., callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer, otherwise=newest_checkpoint_of_its_own))

Owns what the Trainer keeps beside model and optimizer: its state, the scheduler, the scaler, what its callbacks keep. A checkpoint
folder without weights tells the Trainer where to go on, and it loads none from there, for they are in the model already. Its log
history begins anew with each attempt. A snapshot is taken when all is done behind a step, for an evaluation changes the best
metric, and may change the learning rate.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

import resilient
from resilient import clock, worker

NOT_SAVED = ("log_history", "is_local_process_zero", "is_world_process_zero")  # grows without end; each rank's own
LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}  # by the Trainer, and as the runtime calls them


class _Rest:
    """The part of the state that the Trainer makes anew when it begins to train."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.scheduler: Any = None
        self.loaded: Mapping[str, Any] | None = None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        assert self.trainer.optimizer is not None
        return self.trainer.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        state = dataclasses.asdict(dataclasses.replace(self.trainer.state, log_history=[]))
        scaler = self.trainer.accelerator.scaler
        return {
            "trainer": json.dumps({key: value for key, value in state.items() if key not in NOT_SAVED}),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "lr": [group["lr"] for group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def own_state(self) -> dict[str, Any]:
        """What callbacks keep, by class, in the order that the Trainer calls them: how long one waits for a better metric."""
        callbacks = self._callbacks().items()
        return {"callbacks": {name: [each.state().get("attributes", {}) for each in found] for name, found in callbacks}}

    def load_own_state(self, state: Mapping[str, Any], *, same: bool) -> None:
        """Of another number of ranks, callbacks go on from the first one's."""
        if self.loaded is not None:
            self.loaded = {**self.loaded, **state}

    def _callbacks(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for each in self.trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                found.setdefault(type(each).__name__, []).append(each)
        return found

    def begin(self, scheduler: Any) -> None:
        """Scheduler and scaler are there."""
        self.scheduler = scheduler
        if self.loaded is None:
            return
        for name, callbacks in self._callbacks().items():
            for each, attributes in zip(callbacks, self.loaded.get("callbacks", {}).get(name, ()), strict=False):
                for attribute, value in attributes.items():
                    setattr(each, attribute, value)
        for part, saved in ((scheduler, self.loaded["scheduler"]), (self.trainer.accelerator.scaler, self.loaded["scaler"])):
            if part is not None and saved is not None:
                part.load_state_dict(saved)
        for group, lr in zip(self._groups, self.loaded["lr"], strict=True):
            group["lr"] = lr  # a scheduler that is made sets it to that of its first step


class ResilientCallback(TrainerCallback):
    """One per Trainer; without a supervisor it does nothing. On all ranks alike."""

    def __init__(self) -> None:
        self._attached: resilient.Attached | None = None
        self._rest: _Rest | None = None
        self._trained: Mapping[str, object] = {}  # what snapshots have
        self._folder: Path | None = None
        self._training = False
        self._line: dict[str, Any] | None = None  # the metrics of a step that is not told
        self._stepped_t: float | None = None
        self._awaits = False  # a step is told, and its snapshot awaits what the Trainer does behind it
        self._stops = False

    def resume(self, trainer: Trainer, otherwise: str | None = None) -> str | None:
        """Go on from the newest snapshot; what to give `trainer.train` as `resume_from_checkpoint`.

        Args:
            otherwise: the newest checkpoint that the Trainer has written by itself; returned where no snapshot is as new.

        Raises ValueError where the Trainer shards the model by itself (FSDP, DeepSpeed), or makes another one (`model_init`).
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "ResilientCallback keeps no snapshots of a Trainer with FSDP or DeepSpeed: leave it out, and go on as before"
            )
        if trainer.model_init is not None:
            raise ValueError(
                "ResilientCallback keeps no snapshots of a Trainer with model_init, which makes another model when it begins to "
                "train: give it a model in place of model_init"
            )
        model, optimizer = trainer.model, trainer.create_optimizer()
        assert model is not None
        self._trained = {"model": model, "optimizer": _unwrapped(optimizer)}
        self._be_last(trainer)
        self._end_before_the_best(trainer)
        self._rest = _Rest(trainer)
        self._attached = None  # that of a training which has failed is in use no more
        self._attached = resilient.attach(model=model, optimizer=optimizer, extra={"trainer": self._rest})
        if self._rest.loaded is None or self._attached.step < _step_of(otherwise):
            self._attached.begin()  # its random numbers are not these
            self._rest.loaded = None
            return otherwise
        self._folder = Path(tempfile.mkdtemp(prefix="resilient-resume-"))
        (self._folder / TRAINER_STATE_NAME).write_text(self._rest.loaded["trainer"])
        _load_no_weights(trainer, str(self._folder))
        return str(self._folder)

    # -- what the Trainer calls ----------------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """All is made, and what was saved of it was read. Raises RuntimeError, ValueError where that is not what `resume` has."""
        if self._rest is None:
            raise RuntimeError("call ResilientCallback.resume(trainer) before trainer.train")
        for what, given in self._trained.items():
            if _unwrapped(kwargs[what]) is not given:
                raise ValueError(
                    f"the Trainer trains another {what} than ResilientCallback.resume was given, so that no snapshot has what is "
                    "trained: call resume right before trainer.train, and replace nothing in between"
                )
        self._rest.begin(kwargs["lr_scheduler"])
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None
        self._training, self._stops, self._awaits = True, False, False
        worker.infer("step")

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At the begin of an epoch random numbers are drawn for its order; in the middle of one they were drawn before."""
        self._complete(state, control)
        if self._attached is not None and _is_whole(state):
            self._attached.begin()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The batches of the step are there."""
        assert self._attached is not None
        self._complete(state, control)
        self._attached.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step is done, with scheduler and counters; where its loss is logged next, it is told then."""
        now, before_t = clock.now(), self._stepped_t
        self._stepped_t = now
        self._line = {"step": state.global_step, **({"step_s": now - before_t} if before_t else {})}
        if not control.should_log:
            self._tell(state, control, more=_more_follows(state, control, kwargs["train_dataloader"]))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What is logged is that of the steps since it was logged last."""
        if self._line is not None:
            logs: Mapping[str, Any] = kwargs.get("logs") or {}
            self._line.update({name: float(logs[key]) for key, name in LOGGED.items() if key in logs})
            self._tell(state, control, more=_more_follows(state, control, kwargs["train_dataloader"]))

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Where a stop has ended it early, what is done at its end is done when it has ended."""
        if self._stops and not _is_whole(state):
            control.should_evaluate = control.should_save = False
        self._infer(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Also where the script evaluates by itself, as after the training."""
        self._infer(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._infer(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end(state, control)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _tell(self, state: TrainerState, control: TrainerControl, *, more: bool) -> None:
        """Tell of the step that is done, if that was not told; beat, take a snapshot, have the Trainer stop and save if asked.

        Args:
            more: the Trainer does more behind it, and the snapshot awaits that.
        """
        line, self._line = self._line, None
        if line is None or self._attached is None:
            return
        if state.is_world_process_zero:
            worker.report(line)  # first: a step that has a snapshot is not computed again
        self._attached.end_step(state.global_step)
        self._awaits = more
        if more:
            reason = worker.should_stop()
        else:
            self._attached.take_due()
            reason = self._attached.should_stop()
        if reason is not None:
            self._stops = control.should_training_stop = control.should_save = True
        self._infer(control)

    def _complete(self, state: TrainerState, control: TrainerControl) -> None:
        """The Trainer has done what it does behind a step."""
        self._tell(state, control, more=False)
        if self._awaits and self._attached is not None:
            self._awaits = False
            self._attached.take_due()

    def _end(self, state: TrainerState, control: TrainerControl) -> None:
        """The last step is saved, once; what becomes of the model then is in no snapshot."""
        if self._training and self._attached is not None:
            self._complete(state, control)
            self._attached.close()
        self._training = False

    def _infer(self, control: TrainerControl) -> None:
        """What the Trainer does next."""
        if self._training:
            worker.infer("eval" if control.should_evaluate else "snapshot" if control.should_save else "step")

    def _be_last(self, trainer: Trainer) -> None:
        """Of its callbacks: what the others ask for behind a step is known then."""
        if self in trainer.callback_handler.callbacks:
            trainer.remove_callback(self)
            trainer.add_callback(self)

    def _end_before_the_best(self, trainer: Trainer) -> None:
        """The training is over where the Trainer loads the best weights in place of the last ones; it tells of its end later."""
        load = trainer._load_best_model

        def load_best_model() -> None:
            self._end(trainer.state, trainer.control)
            load()

        trainer._load_best_model = load_best_model  # type: ignore[method-assign]


def _more_follows(state: TrainerState, control: TrainerControl, loader: Any) -> bool:
    """Whether the Trainer does something behind this step: where nobody knows the length of an epoch, it may be its last one."""
    ends = control.should_epoch_stop or control.should_training_stop or _is_whole(state) or not has_length(loader)
    return ends or control.should_evaluate or control.should_save


def _is_whole(state: TrainerState) -> bool:
    """Whether an epoch is, after a step or before all of them."""
    return float(state.epoch or 0.0).is_integer()


def _unwrapped(found: Any) -> Any:
    """What Accelerate has put an AcceleratedOptimizer around."""
    return found.optimizer if isinstance(found, AcceleratedOptimizer) else found


def _step_of(folder: str | None) -> int:
    return TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME)).global_step if folder is not None else 0


def _load_no_weights(trainer: Trainer, folder: str) -> None:
    """Have it load no weights where it goes on from this folder; it takes no model of another library for one without."""
    load = trainer._load_from_checkpoint

    def load_from_checkpoint(resume_from_checkpoint: str, *more: Any, **words: Any) -> None:
        if resume_from_checkpoint != folder:
            load(resume_from_checkpoint, *more, **words)

    trainer._load_from_checkpoint = load_from_checkpoint  # type: ignore[method-assign]
