"""Validation beside training: it gives way to a stop."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from trainer_ranks import run_ranks, train, trained, write_config, write_dataset

from resilient.heartbeat.agent_side import AgentRegion
from resilient.heartbeat.layout import NOT_BEATEN
from resilient.worker import REGION_VARIABLE


def told_to_stop(config: Path, told: int | None, stop_at: int | None) -> list[dict[str, Any]]:
    """Train on this rank. Args: told: the rank whose agent has told it already that all are to stop; stop_at: as of `train`."""
    region = AgentRegion(config.parent / f"region-{os.environ['RANK']}")
    if told == int(os.environ["RANK"]):
        region.propose(NOT_BEATEN, "SIGTERM")
        region.arm(NOT_BEATEN)
    with mock.patch.dict(os.environ, {REGION_VARIABLE: str(region.path)}):
        return train(config, stop_at=stop_at)


@pytest.mark.parametrize(("told", "events"), [(None, ["resumed", "validation"]), (1, ["resumed"])])
def test_a_validation_is_left_by_all_ranks_when_one_knows_of_a_stop(tmp_path: Path, told: int | None, events: list[str]):
    dataset = write_dataset(tmp_path / "walks")
    config = write_config(tmp_path, dataset, train={"eval_interval": 1, "eval_iters": 2})
    found = run_ranks(2, told_to_stop, config, told, 0)
    assert [line["event"] for line in found[0]] == events


def test_the_last_validation_of_a_run_is_not_left(tmp_path: Path):
    config = write_config(tmp_path, write_dataset(tmp_path / "walks"), train={"steps": 2, "eval_interval": 1, "eval_iters": 2})
    found = run_ranks(2, told_to_stop, config, 1, None)
    assert [line["step"] for line in found[0] if line["event"] == "validation"] == [2]


def ended_in_its_validation(config: Path) -> None:
    """Train on this rank until the last validation, in which the process ends."""
    from trainer.loop import Trainer

    def validate(self: Trainer, *, last: bool) -> None:
        if last:
            raise KeyboardInterrupt

    with mock.patch.object(Trainer, "_validate", validate):
        with suppress(KeyboardInterrupt):
            train(config)


def test_the_last_step_is_saved_before_the_last_validation_which_a_run_that_was_ended_in_it_does_again(tmp_path: Path):
    dataset = write_dataset(tmp_path / "walks")
    wanted = {"steps": 3, "eval_interval": 2, "eval_iters": 2}
    whole, config = (write_config(tmp_path / name, dataset, train=wanted) for name in ("whole", "ended"))
    told = trained(whole, 1)
    assert [line["event"] for line in told[-3:]] == ["snapshot", "committed", "validation"]
    run_ranks(1, ended_in_its_validation, config)
    resumed = trained(config, 1)
    assert [line["event"] for line in resumed] == ["resumed", "validation"] and resumed[0]["step"] == 3
    assert resumed[-1] == told[-1]
