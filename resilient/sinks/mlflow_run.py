"""MLflow: a run in a file store below the run directory, or wherever the settings say."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files are what a compute node can write without a server
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric

from resilient.config.sinks import MLflow
from resilient.ledger import EVENTS, METRICS
from resilient.sinks.base import Campaign, Line, Sink
from resilient.sinks.trackers import numbers_of, step_of

_TAG = "resilient.identity"
_MOST = 1000  # metrics that MLflow takes at a time


class MLflowSink(Sink):
    """One run for all jobs of a campaign. Args: settings: of `resilient.config.sinks.MLflow`."""

    files = (EVENTS, METRICS)

    def __init__(self, campaign: Campaign, settings: Mapping[str, Any]) -> None:
        wanted = MLflow(**settings)
        self._step = 0
        self._client = MlflowClient(wanted.uri or (campaign.run_dir / "mlruns").as_uri())
        name = wanted.experiment or campaign.name
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{campaign.identity}'")
        run = found[0] if found else self._client.create_run(experiment, run_name=campaign.name, tags={_TAG: campaign.identity})
        self._run = run.info.run_id
        if found:
            self._client.update_run(self._run, status="RUNNING")

    def take(self, lines: Sequence[Line]) -> None:
        metrics = []
        for line in lines:
            self._step = step_of(line.entry, self._step)
            t_ms = int(line.entry["t"] * 1000)
            metrics += [Metric(name, value, t_ms, self._step) for name, value in numbers_of(line.entry).items()]
        for start in range(0, len(metrics), _MOST):
            self._client.log_batch(self._run, metrics=metrics[start : start + _MOST])
        for line in lines:
            if line.entry.get("event") == "run_finished":
                self._client.set_terminated(self._run, "FINISHED" if line.entry["exit_code"] == 0 else "FAILED")
