"""MLflow: a run in a file store below the run directory, or wherever the settings say."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # files are what a compute node can write without a server
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault(
    "MLFLOW_HTTP_REQUEST_TIMEOUT", "30"
)  # a server that hangs, or fails, is told soon, and tried again by the pump
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

from mlflow import MlflowClient
from mlflow.entities import Metric, RunStatus
from mlflow.exceptions import MlflowException

from resilient.config.sinks import MLflow
from resilient.exits import Exit
from resilient.ledger import EVENTS, METRICS
from resilient.sinks.base import Campaign, Line, NotTaken, Refused, Sink
from resilient.sinks.in_time import in_time
from resilient.sinks.trackers import mlflow_name, numbers_of, step_of

log = logging.getLogger(__name__)

_TAG = "resilient.identity"
_NAMES_CLASH = (NotADirectoryError, IsADirectoryError, FileExistsError)
_MOST = 1000  # metrics that MLflow takes at a time
ANSWER_S = 60.0  # for the whole of an answer


class MLflowSink(Sink):
    """One run for all jobs of a campaign. Args: settings: of `resilient.config.sinks.MLflow`."""

    files = (EVENTS, METRICS)

    def __init__(self, campaign: Campaign, settings: Mapping[str, Any]) -> None:
        wanted = MLflow(**settings)
        self._step = 0
        self._refused: set[str] = set()  # names that clash with others
        self._client = MlflowClient(wanted.uri or (campaign.run_dir / "mlruns").as_uri())
        name = wanted.experiment or campaign.name
        with in_time(ANSWER_S):
            self._run = self._found(name, campaign)

    def _found(self, name: str, campaign: Campaign) -> str:
        """The id of the campaign's run, which is made if need be."""
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{campaign.identity}'")
        run = found[0] if found else self._client.create_run(experiment, run_name=campaign.name, tags={_TAG: campaign.identity})
        return str(run.info.run_id)

    def take(self, lines: Sequence[Line]) -> None:
        """Log their numbers; of a line by itself those that are taken, if any are. Raises Refused and NotTaken."""
        metrics = []
        for line in lines:
            self._step = step_of(line.entry, self._step)
            t_ms = int(line.entry["t"] * 1000)
            named = ((mlflow_name(name), value) for name, value in numbers_of(line.entry).items())
            metrics += [Metric(name, value, t_ms, self._step) for name, value in named if name not in self._refused]
        if len(lines) == 1:
            self._log_each(metrics)
        else:
            for start in range(0, len(metrics), _MOST):
                self._log(metrics[start : start + _MOST])
        if told := [status for line in lines if (status := _status_of(line.entry)) is not None]:
            self._becomes(told[-1])

    def _becomes(self, status: str) -> None:
        try:
            with in_time(ANSWER_S):
                if RunStatus.is_terminated(RunStatus.from_string(status)):
                    self._client.set_terminated(self._run, status)
                else:
                    self._client.update_run(self._run, status=status)
        except MlflowException as error:
            raise self._judged(error) from None

    def _log_each(self, metrics: Sequence[Metric]) -> None:
        """Those of one line: together, or each by itself where that is refused."""
        try:
            self._log(metrics)
            return
        except Refused:
            if len(metrics) <= 1:
                raise
        taken = 0
        for metric in metrics:
            try:
                self._log([metric])
                taken += 1
            except Refused as refusal:
                log.warning("mlflow: %s at step %d is passed over: %s", metric.key, metric.step, refusal)
        if not taken:
            raise Refused(f"none of {', '.join(metric.key for metric in metrics)}")

    def _log(self, metrics: Sequence[Metric]) -> None:
        try:
            with in_time(ANSWER_S):
                self._client.log_batch(self._run, metrics=metrics)
        except MlflowException as error:
            if isinstance(error.__context__, _NAMES_CLASH):  # a file store keeps each metric in a file of its name
                if len(metrics) == 1:
                    self._refused.add(metrics[0].key)
                raise Refused(f"another metric's name is a part of its name: {error}") from None
            raise self._judged(error) from None

    def _judged(self, error: MlflowException) -> NotTaken | Refused:
        """Whether it refuses what it was sent, or takes nothing now: of a run that somebody has deleted it says the same."""
        if error.error_code != "INVALID_PARAMETER_VALUE":
            return NotTaken(str(error))
        try:
            with in_time(ANSWER_S):
                is_there = self._client.get_run(self._run).info.lifecycle_stage == "active"
        except MlflowException as unknown:
            return NotTaken(f"{error}; whether its run is there is not known: {unknown}")
        return Refused(str(error)) if is_there else NotTaken(str(error))


def _status_of(entry: Mapping[str, Any]) -> str | None:
    """What a line makes of the run, in MLflow's words; None: nothing else. A stop is no failure: another job goes on."""
    match entry.get("event"):
        case "run_started":
            return "RUNNING"
        case "run_finished":
            return {Exit.OK: "FINISHED", Exit.STOPPED: "SCHEDULED"}.get(entry["exit_code"], "FAILED")
    return None
