"""Validation beside training: it gives way to a stop."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from trainer_ranks import run_ranks, train, write_config, write_dataset

from resilient.heartbeat_region import NOT_BEATEN, AgentRegion
from resilient.worker import REGION_VARIABLE


def stopped_at_once(config: Path, told: int | None) -> list[dict[str, Any]]:
    """Train on this rank until before the first step. Args: told: the rank whose agent has told it already that all are to stop."""
    region = AgentRegion(config.parent / f"region-{os.environ['RANK']}")
    if told == int(os.environ["RANK"]):
        region.propose(NOT_BEATEN, "SIGTERM")
        region.arm(NOT_BEATEN)
    with mock.patch.dict(os.environ, {REGION_VARIABLE: str(region.path)}):
        return train(config, stop_at=0)


@pytest.mark.parametrize(("told", "events"), [(None, ["resumed", "validation"]), (1, ["resumed"])])
def test_a_validation_is_left_by_all_ranks_when_one_knows_of_a_stop(tmp_path: Path, told: int | None, events: list[str]):
    dataset = write_dataset(tmp_path / "walks")
    config = write_config(tmp_path, dataset, train={"eval_interval": 1, "eval_iters": 2})
    found = run_ranks(2, stopped_at_once, config, told)
    assert [line["event"] for line in found[0]] == events
