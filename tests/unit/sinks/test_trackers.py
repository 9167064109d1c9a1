"""W&B offline and MLflow's file store, written by their packages and read back.

The packages are imported where they are used: each process of a test run collects all tests, and importing these two takes seconds.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from resilient.sinks.base import Sink
from resilient.sinks.following import LineFile
from resilient.sinks.trackers import numbers_of

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from wandb.proto.wandb_internal_pb2 import Record


def wandb_sink(written: Any) -> Sink:
    from resilient.sinks.wandb_run import WandBSink

    return WandBSink(written.campaign(), {"directory": str(written.run_dir)})


def mlflow_sink(written: Any) -> Sink:
    from resilient.sinks.mlflow_run import MLflowSink

    return MLflowSink(written.campaign(), {})


def mlflow_client(run_dir: Path) -> "MlflowClient":
    from mlflow import MlflowClient

    return MlflowClient((run_dir / "mlruns").as_uri())


def feed(sink: Any, written) -> None:
    for name in sink.files:
        sink.take(LineFile(written.run_dir / name).read())


@pytest.fixture
def campaign(written):
    """Steps 2 and 3 are computed twice."""
    written.started()
    for step in range(1, 4):
        written.step(step)
    written.fault(1)
    for step in range(2, 5):
        written.step(step, generation=2)
    written.finished(generation=2)
    return written


BLOCK_BYTES = 32768
FULL, FIRST, _, LAST = range(1, 5)


def records(data: bytes) -> "Iterator[Record]":
    """Those of a file of W&B: a log as LevelDB writes it, behind seven bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    assert data.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(data):
        room = BLOCK_BYTES - at % BLOCK_BYTES
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if room < 7 or kind == 0:
            at += room
            continue
        parts = (b"" if kind in (FULL, FIRST) else parts) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the history in the files that `wandb sync` uploads."""
    rows = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path.read_bytes()):
            if record.WhichOneof("record_type") == "history":
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return rows


def test_wandb_has_every_step_also_those_that_were_computed_again(campaign):
    sink = wandb_sink(campaign)
    feed(sink, campaign)
    sink.close()
    rows = recorded(campaign.run_dir)
    steps = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert steps == [(step, 5.0 / step) for step in (1, 2, 3, 2, 3, 4)]
    assert [row["resilient/lost_steps"] for row in rows if "resilient/lost_steps" in row] == [2]


def history(run_dir: Path, name: str) -> list[tuple[int, float]]:
    client = mlflow_client(run_dir)
    experiment = client.get_experiment_by_name("demo")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1
    return [(metric.step, metric.value) for metric in client.get_metric_history(runs[0].info.run_id, name)]


def test_mlflow_has_every_step_in_one_run_for_all_jobs(campaign):
    first = mlflow_sink(campaign)
    feed(first, campaign)
    position = (campaign.run_dir / "metrics.jsonl").stat().st_size
    campaign.step(5, generation=3)
    second = mlflow_sink(campaign)
    second.take(LineFile(campaign.run_dir / "metrics.jsonl", position).read())
    assert sorted(history(campaign.run_dir, "train/loss")) == sorted((step, 5.0 / step) for step in (1, 2, 3, 2, 3, 4, 5))
    assert history(campaign.run_dir, "resilient/downtime_s") == [(3, 3.0)]


def test_the_ranks_of_a_job_stand_at_the_step_that_it_goes_on_from(campaign):
    campaign.event("run_started", 3, name="demo", target_step=100)
    campaign.event("generation_started", 3, nodes=["here"], world_size=8, resumed_step=4)
    events = LineFile(campaign.run_dir / "events.jsonl").read()
    ranks = [(0, 2.0), (1, 2.0), (4, 8.0)]
    mlflow = mlflow_sink(campaign)
    mlflow.take(events[:-2])
    mlflow_sink(campaign).take(events[-2:])  # the next job's
    assert sorted(history(campaign.run_dir, "resilient/world_size")) == ranks
    wandb = wandb_sink(campaign)
    wandb.take(events)
    wandb.close()
    rows = recorded(campaign.run_dir)
    assert [(row["step"], row["resilient/world_size"]) for row in rows if "resilient/world_size" in row] == ranks


def test_a_campaign_that_is_over_is_finished_in_mlflow(campaign):
    feed(mlflow_sink(campaign), campaign)
    client = mlflow_client(campaign.run_dir)
    [run] = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    assert run.info.status == "FINISHED"


def status(run_dir: Path) -> str:
    client = mlflow_client(run_dir)
    [run] = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    return str(run.info.status)


def test_mlflow_shows_what_became_of_a_campaign_by_the_order_of_its_jobs(written):
    sink = mlflow_sink(written)
    at_bytes = 0

    def after(*codes: int | None) -> str:
        nonlocal at_bytes
        for code in codes:
            if code is None:
                written.started()
            else:
                written.finished(code)
        file = LineFile(written.run_dir / "events.jsonl", at_bytes)
        sink.take(file.read())
        at_bytes = file.at_bytes
        return status(written.run_dir)

    assert after(None) == "RUNNING"
    assert after(75) == "SCHEDULED"
    assert after(None) == "RUNNING"
    assert after(70, None, 75, None) == "RUNNING"
    assert after(70) == "FAILED"
    mlflow_sink(written)  # to send what is left, where nothing is
    assert status(written.run_dir) == "FAILED"
    assert after(None, 0) == "FINISHED"


def test_what_is_no_number_is_left_out():
    line = {"t": 1.0, "generation": 1, "step": 2, "loss": float("nan"), "lr": 1, "note": "x", "ok": True, "big": 10**400}
    assert numbers_of(line) == {"train/lr": 1.0}
