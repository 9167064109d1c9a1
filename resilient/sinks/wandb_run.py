"""Weights & Biases, offline: `wandb sync RUN_DIR/wandb/offline-run-*` uploads it from where there is a network."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from resilient.config.sinks import WandB
from resilient.ledger import EVENTS, METRICS
from resilient.sinks.base import Campaign, Line, Sink
from resilient.sinks.trackers import numbers_of, step_of


class WandBSink(Sink):
    """Jobs of one campaign write folders of their own, of the same run. Args: settings: of `resilient.config.sinks.WandB`."""

    files = (EVENTS, METRICS)

    def __init__(self, campaign: Campaign, settings: Mapping[str, Any]) -> None:
        wanted = WandB(**settings)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._step = 0
        self._run = wandb.init(
            mode="offline",
            dir=str(wanted.directory),
            project=wanted.project or campaign.name,
            entity=wanted.entity,
            name=campaign.name,
            id=campaign.identity,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a step that is computed again stands there again

    def take(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._step = step_of(line.entry, self._step)
            if numbers := numbers_of(line.entry):
                self._run.log({**numbers, "step": self._step, "generation": line.entry["generation"]})

    def close(self) -> None:
        self._run.finish()
        wandb.teardown()  # waits for the process that writes the file
