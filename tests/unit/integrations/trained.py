"""A script of transformers' Trainer with the callback, of one layer; imported only by what uses it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from resilient.integrations.transformers import ResilientCallback

BATCH = 2
PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}}


class Interrupted(Exception):
    """A rank that dies."""


class Model(torch.nn.Module):
    """Its loss on what it is evaluated with gets worse: an early step is the best one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.looks: Callable[..., None] = lambda **_: None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.looks(trains=self.training)
        found = self.layer(x)
        return {"loss": (found - (labels if self.training else -labels)).square().mean(), "logits": found}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.tensor([1 + index / self._count])
        return {"x": x, "labels": 3 * x}


class Recorder(TrainerCallback):
    """What each step comes to, by its number."""

    def __init__(self, script: "Script", asks_at: int | None) -> None:
        self._script, self._asks_at = script, asks_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        script = self._script
        rates = [group["lr"] for group in script.trainer.optimizer.param_groups]
        script.steps[state.global_step] = [script.weights(), rates, state.best_metric, state.best_global_step]
        control.should_evaluate = control.should_evaluate or state.global_step == self._asks_at

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._script.evaluated.append(state.global_step)


class Script:
    """Made anew for each attempt.

    Args:
        rows: of which an epoch has half as many steps.
        asks_at: a callback behind the others asks for an evaluation at this step.
        patience: the training ends after so many evaluations in a row without a better loss.
    """

    def __init__(
        self, folder: Path, steps: int, rows: int, *, asks_at: int | None = None, patience: int | None = None, **words: Any
    ) -> None:
        torch.manual_seed(3)
        self.steps: dict[int, list[Any]] = {}
        self.evaluated: list[int] = []
        self.model = Model()
        arguments = TrainingArguments(
            str(folder),
            **{
                "max_steps": steps,
                "per_device_train_batch_size": BATCH,
                "learning_rate": 0.1,
                "metric_for_best_model": "loss",
                "greater_is_better": False,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "logging_steps": 5,
                "use_cpu": True,
                **(PLATEAU if "eval_strategy" in words else {}),
                **words,
            },
        )
        self.callback = ResilientCallback()
        callbacks = [self.callback, Recorder(self, asks_at), *([EarlyStoppingCallback(patience)] if patience is not None else [])]
        self.trainer = Trainer(self.model, arguments, train_dataset=Rows(rows), eval_dataset=Rows(4), callbacks=callbacks)

    def weights(self) -> list[float]:
        return [value.item() for value in self.model.state_dict().values()]

    def train(self, otherwise: str | None = None) -> None:
        self.trainer.train(resume_from_checkpoint=self.callback.resume(self.trainer, otherwise))

    def train_up_to(self, step: int) -> None:
        """It is interrupted in the next one."""

        def looks(*, trains: bool) -> None:
            if trains and self.trainer.state.global_step >= step:
                raise Interrupted

        self.model.looks = looks
        try:
            self.train()
        except Interrupted:
            return
        raise AssertionError("it was not interrupted")
