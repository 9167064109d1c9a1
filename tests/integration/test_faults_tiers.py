"""Faults of storage, checkpoints and jobs: each is done by a hand to a campaign that runs, seen to happen, and seen to be mended."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Campaign, wait_for
from hands import strike

from checkpoint import verify

EVERY = 10
Keeping = Callable[..., Campaign]


def until(run: Campaign, holds: Callable[[], Any], why: str) -> Any:
    """Wait for something that a campaign does; it must not end before."""

    def found() -> Any:
        assert run.process is not None
        over = run.process.poll() is not None
        if not (got := holds()) and over:
            run.wait()
            pytest.fail(f"the campaign ended before {why}\n{run.output}\n{run.logs()}")
        return got

    return wait_for(found, f"{why}\n{run.logs()}")


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory in RAM; nothing of the campaign may be left in it."""
    path = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def keeping(campaign: Callable[..., Campaign], ram: Path) -> Keeping:
    """A campaign of the toy that has a state, with snapshots in RAM at every step."""

    def make(steps: int = 100, *, durable: Path | None = None, directory: Path | None = None, **changes: Any) -> Campaign:
        tiers = [
            {"name": "ram", "path": str(changes.pop("memory", ram)), "keep_last": 2, "replicas": 1},
            *changes.pop("between", []),
            {"name": "durable", "path": str(durable or "${run_dir}/checkpoints")},
        ]
        return campaign(
            directory,
            entrypoint="keeping:train",
            cluster={"procs_per_node": 2, "device": "cpu", **changes.pop("cluster", {})},
            train={"steps": steps},
            checkpoint={"every_steps": EVERY, "tiers": tiers},
            **changes,
        )

    return make


def committed(run: Campaign) -> list[int]:
    return [event["step"] for event in run.events("committed")]


def rejected(run: Campaign) -> list[tuple[int, str]]:
    return [(event["step"], event["tier"]) for event in run.events("checkpoint_rejected")]


def held(run: Campaign) -> list[int]:
    """Steps that RAM has held."""
    return [event["step"] for event in run.events("snapshot") if event["tier"] == "ram"]


def well(run: Campaign, steps: int) -> None:
    """It came to its end with one loss for each step, however often that was computed, and a sound checkpoint."""
    assert run.wait() == 0, run.output + run.logs()
    losses = run.losses()
    assert sorted(losses) == list(range(1, steps + 1))
    assert all(len(each) == 1 for each in losses.values()), {step: each for step, each in losses.items() if len(each) > 1}
    verify(Path(run.config["checkpoint"]["tiers"][-1]["path"].replace("${run_dir}", str(run.run_dir))) / f"step-{steps:08}")


# -- checkpoints that are damaged --------------------------------------------------------------------------------------


def test_damaged_checkpoints_are_passed_over_and_the_one_before_is_gone_on_from(keeping: Keeping):
    run = keeping(220).start()
    for number, (fault, params) in enumerate(
        [
            ("torn_write", {}),
            ("missing_chunk", {}),
            ("flipped_byte", {"seed": 1}),
            ("flipped_byte", {"seed": 2}),
            ("stale_latest", {}),
            ("flipped_byte", {"tier": "memory", "seed": 3}),
        ]
    ):
        seen, before = len(committed(run)), rejected(run)
        until(run, lambda seen=seen: len(committed(run)) >= seen + 2, f"two more checkpoints before {fault}")
        evidence = strike(run, fault, rank=1, node=0, **params)
        step = evidence["step"]
        until(run, lambda number=number: len(run.events("recovered")) == number + 1, f"the recovery from {fault}")
        wrong = step + 1 if fault == "stale_latest" else step
        new = rejected(run)[len(before) :]
        assert new == [(wrong, evidence["tier"])], (fault, evidence, new)
        started = run.events("generation_started")[-1]
        assert started["tier"] == evidence["tier"], (fault, started)
        assert started["resumed_step"] < wrong, (fault, started)
        told = run.events("fault")[-1]
        assert (told["kind"], told["ranks"]) == ("exit", [1]), told
    well(run, 220)
