"""Hybrid sharding: what a node holds in RAM, another one holds too, and the loss of a node costs no step that they have."""

import copy
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaigns import MODEL, Campaign, Training, alive, holding, wait_for, weights

STEPS = 16
TRAIN = {"steps": STEPS, "eval_interval": 0}
DROPOUT = {**MODEL, "dropout": 0.1}  # so that the random numbers of each rank must be those that it had


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory in RAM; nothing of the campaign may be left in it."""
    path = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tiers(ram: Path) -> dict[str, Any]:
    """A snapshot in RAM at every step; nothing is durable before the end."""
    fast = {"name": "ram", "path": str(ram), "keep_last": 2, "replicas": "auto"}
    return {"every_steps": 1000, "tiers": [fast, {"name": "durable", "path": "${run_dir}/checkpoints"}]}


def crash(run: Campaign, ram: Path, node: int) -> None:
    """A node is gone, with everything that runs on it and everything that it holds."""
    agent = wait_for(lambda: run.agents().get(node), f"the agent of node {node}")
    agent.suspend()  # so that nothing is started anew before everything is gone
    family = agent.children(recursive=True)
    for process in family:
        process.suspend()
    for process in family:
        process.kill()
    wait_for(lambda: not any(alive(process) for process in family), "the end of what ran on the node")
    for directory in ram.glob(f"*/node{node}"):
        shutil.rmtree(directory)
    agent.kill()


def parts(ram: Path) -> list[Path]:
    """What one node holds for another one."""
    return list(ram.glob("*/node*/replica-*"))


def without_a_node(training: Training, ram: Path, node: int, config: dict[str, Any]) -> Campaign:
    """A campaign that loses a node in the middle, with all that it holds, and is done nevertheless."""
    run = training(**copy.deepcopy(config), **holding(STEPS - 4), model=DROPOUT, train=TRAIN, checkpoint=tiers(ram)).start()
    run.reach(STEPS // 2)
    wait_for(lambda: run.events("replicated"), "a snapshot that two nodes hold")
    crash(run, ram, node)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    (lost,) = [event for event in run.events("fault") if event["kind"] == "node_lost"]
    assert not [event for event in run.events("committed") if event["t"] < lost["t"]]
    resumed = run.events("generation_started")[1]
    assert resumed["tier"] == "ram"
    assert resumed["resumed_step"] >= max(event["step"] for event in run.events("replicated") if event["t"] < lost["t"])
    assert not parts(ram), "a copy was made of what another node holds"
    return run


@pytest.mark.soak
def test_a_node_that_is_lost_with_its_ram_is_restored_from_the_one_that_holds_the_same(training: Training, ram: Path):
    run = without_a_node(training, ram, 1, {"cluster": {"nodes": 2, "device": "cpu"}, "parallel": {"dp_replicate": 2}})
    losses = run.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in losses.values())  # also of what was computed again


@pytest.mark.soak
@pytest.mark.parametrize(
    ("nodes", "procs", "parallel", "node"),
    [
        (2, 1, {"dp_replicate": 2}, 0),
        (2, 2, {"dp_replicate": 2}, 1),
        (4, 1, {"dp_replicate": 2, "zero_stage": 3}, 3),
        (4, 1, {"pp": 2, "dp_replicate": 2}, 0),
        (2, 2, {"tp": 2, "dp_replicate": 2, "zero_stage": 2}, 1),
    ],
    ids=str,
)
def test_on_every_layout_a_node_restored_from_the_one_that_holds_the_same_makes_no_bit_different(
    training: Training, ram: Path, tmp_path: Path, nodes: int, procs: int, parallel: dict[str, Any], node: int
):
    config = {"cluster": {"nodes": nodes, "procs_per_node": procs, "device": "cpu"}, "parallel": parallel}
    calm = training(tmp_path / "calm", **copy.deepcopy(config), model=DROPOUT, train=TRAIN)
    assert calm.run() == 0, calm.output + calm.logs()
    run = without_a_node(training, ram, node, config)
    assert run.losses() == calm.losses()
    ours, theirs = weights(run, STEPS), weights(calm, STEPS)
    assert {name: array.tobytes() for name, array in ours.items()} == {name: array.tobytes() for name, array in theirs.items()}


@pytest.mark.soak
def test_with_a_node_less_a_group_is_dropped_and_the_other_one_goes_on_with_the_shards_that_it_has(training: Training, ram: Path):
    run = training(
        cluster={"nodes": 2, "procs_per_node": 2, "device": "cpu"},
        parallel={"dp_replicate": 2},
        train={**TRAIN, "steps": 30},
        **holding(20, rejoin_s=0),
        checkpoint=tiers(ram),
    ).start()
    run.reach(8)
    wait_for(lambda: run.events("replicated"), "a snapshot that two nodes hold")
    crash(run, ram, 1)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    layouts = [event["layout"] for event in run.events("generation_started")]
    spread = [(each["dp"], each.get("dp_replicate", 1)) for each in layouts]
    assert spread in ([(4, 2), (2, 1)], [(4, 2), (2, 1), (4, 2)])  # as soon as the node is back
    assert {event["tier"] for event in run.events("generation_started")[1:]} == {"ram"}
    assert not parts(ram)
    assert sorted(run.losses()) == list(range(1, 31))
