"""Nodes that leave and return: spares that take over, generations that shrink and grow, and the numbers that come of it."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaigns import EVERY, HELD, STEPS, Campaign, Training, alive, holding, same, wait_for


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory in RAM; nothing of the campaign may be left in it."""
    path = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tiers(run_dir: Path, ram: Path) -> dict[str, Any]:
    """A snapshot in RAM at every step, with a copy on another node."""
    where = str(run_dir / "checkpoints")
    return {
        "every_steps": EVERY,
        "tiers": [{"name": "ram", "path": str(ram), "keep_last": 2, "replicas": 1}, {"name": "durable", "path": where}],
    }


def crash(run: Campaign, node: int) -> None:
    """A node is gone, with everything that runs on it and everything that it holds."""
    agent = wait_for(lambda: run.agents().get(node), f"the agent of node {node}")
    agent.suspend()  # so that nothing is started anew before everything is gone
    family = agent.children(recursive=True)
    for process in family:
        process.suspend()
    for process in family:
        process.kill()
    wait_for(lambda: not any(alive(process) for process in family), "the end of what ran on the node")
    tiers = run.config["checkpoint"]["tiers"][:-1]
    held = [directory for tier in tiers for directory in Path(tier["path"]).glob(f"*/node{node}")]
    gone = [directory.rename(directory.with_name(f".node{node}-{time.monotonic_ns()}")) for directory in held]
    agent.kill()  # soon after its workers, as all of a node goes at once
    for directory in gone:
        shutil.rmtree(directory)


def replicated(ram: Path, since: int, nodes: int = 2) -> bool:
    """Whether some node has a replica of each part of a step after this one; each node has written a part."""
    found = [path.parts[-3:-1] for path in ram.glob("*/node*/replica-*/step-????????/part.json")]
    newest = {replica: max(int(step[5:]) for name, step in found if name == replica) for replica, _ in found}
    return len(newest) == nodes and min(newest.values()) > since


def holds(ram: Path, node: int) -> bool:
    """Whether a node has any shard in memory; directories may vanish meanwhile."""
    places = ram.glob(f"*/node{node}")
    return any("part.json" in files for place in places for _, _, files in os.walk(place))


def members(run: Campaign) -> list[int]:
    """How many nodes each generation had."""
    return [len(event["nodes"]) for event in run.events("generation_started")]


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_node_that_crashes_and_no_bit_is_different(
    training: Training, reference_runs, ram: Path, tmp_path: Path, rounds: int
):
    run = training(
        cluster={"nodes": 2, "procs_per_node": 1, "spares": 1, "device": "cpu"},
        checkpoint={**tiers(tmp_path / "disturbed/run", ram), "every_steps": 1000},  # nothing is durable before the end
        **holding(STEPS - 4),
    ).start()
    chance = random.Random(rounds)
    for kill, step in enumerate(sorted(chance.sample(range(6, STEPS - 4), rounds))):
        run.reach(step)
        wait_for(lambda kill=kill: len(run.events("recovered")) >= kill, "recovery from the crash before")
        since = run.events("generation_started")[-1]["resumed_step"]
        wait_for(lambda since=since: replicated(ram, since), "replicas of what was computed since")
        wait_for(lambda: len(run.agents()) == 3, "three agents")
        crash(run, chance.choice(sorted(run.agents())))
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    # A buddy that was fetching from the node says so before the node is known to be lost.
    assert {fault["kind"] for fault in run.events("fault")} - {"storage"} == {"node_lost"}
    assert set(members(run)) == {2}
    same(run, reference_runs("bf16"))
    for event in run.events("generation_started")[1:]:
        assert event["tier"] == "ram"


def test_without_a_spare_the_run_goes_on_with_fewer_and_takes_the_node_in_again(
    training: Training, reference_runs, ram: Path, tmp_path: Path, rounds: int
):
    steps = {"steps": STEPS * 2}
    run = training(
        entrypoint="paced:train",
        args={"step_s": 0.5},  # until the node is back: more steps than it takes for that
        cluster={"nodes": 2, "procs_per_node": 1, "device": "cpu"},
        checkpoint={**tiers(tmp_path / "disturbed/run", ram), "every_steps": 1000},  # nothing is durable before the end
        resilience={"rejoin_s": 0},
        train=steps,
    ).start()
    run.reach(10)
    wait_for(lambda: replicated(ram, 0), "replicas of what was computed")
    crash(run, 1)
    wait_for(lambda: members(run)[-1] == 1, "a smaller generation")
    wait_for(lambda: members(run)[-1] == 2, f"the return of the node\n{run.logs()}")
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert members(run) == [2, 1, 2]
    assert [event["name"] for event in run.events("action")] == ["replace_node", "shrink", "grow"]
    assert [event["layout"]["dp"] for event in run.events("generation_started")] == [2, 1, 2]
    shrunk, grown = run.events("generation_started")[1:]
    assert shrunk["tier"] == "ram"  # of the buddy
    assert grown["tier"] == "ram"
    seen: dict[int, list[float]] = {}
    for line in run.metrics():
        seen.setdefault(line["step"], []).append(line["loss"])
    assert sorted(seen) == list(range(1, STEPS * 2 + 1))
    for step, losses in reference_runs("bf16").losses().items():
        expected = float(next(iter(losses)))
        assert all(abs(loss - expected) < 2e-2 for loss in seen[step]), step
    again = [step for step, losses in seen.items() if len(losses) > 1]
    kept = max(event["step"] for event in run.events("replicated") if event["generation"] == 1)
    assert min(again, default=kept + 1) > kept, f"what the buddy held was computed again: {again}"
    assert len([step for step in again if step > grown["resumed_step"]]) <= 1, again


@pytest.mark.soak
@pytest.mark.parametrize("lost", [[2], [0, 1, 2, 3]], ids=str)
def test_of_four_nodes_three_go_on_with_the_same_batches_and_four_again_each_time(
    training: Training, ram: Path, tmp_path: Path, lost: list[int]
):
    train = {"steps": STEPS * (1 + 3 * len(lost)), "precision": "fp32", "eval_interval": 0}
    durable = {**tiers(tmp_path / "disturbed/run", ram), "every_steps": 10_000}
    run = training(
        entrypoint="paced:train",
        args={"step_s": 0.2},  # until the last node is back
        cluster={"nodes": 4, "procs_per_node": 1, "threads_per_proc": 1, "device": "cpu"},
        parallel={"dp": 4},
        checkpoint=durable,
        resilience={"rejoin_s": 0, "without_spare": "shrink"},  # a node that came back once would be waited for
        train=train,
    ).start()
    for turn, node in enumerate(lost):
        run.reach(run.step() + 10)
        since = run.events("generation_started")[-1]["resumed_step"] or 0
        wait_for(lambda since=since: replicated(ram, since, 4), "replicas of what was computed")
        crash(run, node)
        wait_for(lambda turn=turn: members(run)[2 * turn + 1 :], f"a smaller generation\n{run.logs()}")
        wait_for(lambda turn=turn: members(run)[2 * turn + 2 :], f"the return of the node\n{run.logs()}")
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert members(run) == [4, *[3, 4] * len(lost)]
    assert [event["layout"]["dp"] for event in run.events("generation_started")] == members(run)
    assert [event["layout"]["longer"] for event in run.events("generation_started")] == [0, *[1, 0] * len(lost)]
    assert not [fault for fault in run.events("fault") if fault["kind"] == "straggler"]
    alone = training(tmp_path / "alone", cluster={"procs_per_node": 1, "threads_per_proc": 1, "device": "cpu"}, train=train)
    assert alone.run() == 0, alone.output + alone.logs()
    expected = {line["step"]: line["loss"] for line in alone.metrics()}
    assert {line["step"] for line in run.metrics()} == set(expected)
    for line in run.metrics():
        assert line["loss"] == pytest.approx(expected[line["step"]], rel=1e-5), line["step"]
        assert line["samples"] == 8 * line["step"]


@pytest.mark.soak
def test_a_worker_killed_while_a_spare_takes_over_costs_one_more_generation(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    run = training(
        cluster={"nodes": 2, "procs_per_node": 1, "spares": 1, "device": "cpu"},
        checkpoint=tiers(tmp_path / "disturbed/run", ram),
        **holding(STEPS - 8),
    ).start()
    run.reach(12)
    wait_for(lambda: len(run.agents()) == 3, "three agents")
    before = set(run.workers().values())
    crash(run, 0)
    fresh = wait_for(lambda: [pid for pid in run.workers().values() if pid not in before], "a worker that is new")
    os.kill(fresh[0], signal.SIGKILL)
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert set(members(run)) == {2}
    same(run, reference_runs("bf16"))


@pytest.mark.soak
def test_a_spare_that_waits_keeps_its_lease_and_one_that_dies_is_started_again_and_disturbs_nobody(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    run = training(
        entrypoint="paced:train",
        args={"step_s": 0.0, "holds": 10},
        cluster={"nodes": 1, "procs_per_node": 2, "spares": 1, "device": "cpu"},
        checkpoint={"every_steps": EVERY},
        resilience={**HELD, "fence_s": 5},
    ).start()
    run.reach(5)
    first = wait_for(lambda: run.agents().get(1), "the spare's agent")
    began = time.monotonic()
    wait_for(lambda: time.monotonic() > began + 12.0, "more time than the fence and its margin")
    assert alive(first) and not run.events("fault")
    first.kill()
    wait_for(lambda: (found := run.agents().get(1)) and found.pid != first.pid, "another one")
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    (fault,) = run.events("fault")
    assert (fault["kind"], fault["ranks"], fault["nodes"]) == ("node_lost", [], [1])
    assert run.events("action")[0]["name"] == "restart_agent"
    assert len(run.events("generation_started")) == 1
    same(run, reference_runs("bf16"))


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_node_with_a_device_that_died_and_no_bit_is_different(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    run = training(
        entrypoint="paced:train",
        args={"step_s": 0.01, "dies": [1, 10], "holds": 5},
        cluster={"nodes": 1, "procs_per_node": 2, "min_procs_per_node": 1, "spares": 1, "device": "cpu"},
        checkpoint={**tiers(tmp_path / "disturbed/run", ram), "every_steps": 1000},
    ).start()
    wait_for(lambda: len(run.agents()) == 2, "the spare's agent")
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert [event["members"] for event in run.events("generation_started")] == [[0], [1]]
    same(run, reference_runs("bf16"))


def command(run: Campaign, name: str, *words: str) -> str:
    """What a command says of a run directory."""
    whole = [sys.executable, "-m", "resilient", name, str(run.run_dir), *words]
    return subprocess.run(whole, check=True, capture_output=True, text=True).stdout


@pytest.mark.soak
def test_a_device_that_dies_costs_its_rank_and_the_others_of_its_node_go_on(training: Training, ram: Path, tmp_path: Path):
    train = {"precision": "fp32", "eval_interval": 0}
    run = training(
        entrypoint="paced:train",
        args={"step_s": 0.01, "dies": [2, 10]},  # the first of the second node
        cluster={"nodes": 2, "procs_per_node": 2, "min_procs_per_node": 1, "device": "cpu"},
        checkpoint={**tiers(tmp_path / "disturbed/run", ram), "every_steps": 1000},
        train=train,
    )
    assert run.run() == 0, run.output + run.logs()
    first, second = run.events("generation_started")
    assert (first["world_size"], second["world_size"], second["layout"]["dp"], second["tier"]) == (4, 3, 3, "ram")
    assert not {"left_out", "ranks"} & {*first}
    assert (second["members"], second["left_out"], second["ranks"]) == ([0, 1], {"1": [0]}, [2, 1])
    assert [action["name"] for action in run.events("action")] == ["restart_workers", "leave_out"]
    (fault,) = run.events("fault")
    assert (fault["ranks"], fault["nodes"], fault["class"]) == ([2], [1], "node")
    alone = training(tmp_path / "alone", cluster={"procs_per_node": 1, "device": "cpu"}, train=train)
    assert alone.run() == 0, alone.output + alone.logs()
    seen: dict[int, list[float]] = {}
    for line in run.metrics():
        seen.setdefault(line["step"], []).append(line["loss"])
    assert sorted(seen) == list(range(1, STEPS + 1))
    for step, losses in alone.losses().items():
        assert all(abs(loss - float(next(iter(losses)))) < 1e-5 * abs(loss) for loss in seen[step]), step
    assert "device 0 of node 1" in command(run, "status")


@pytest.mark.soak
def test_a_node_that_was_left_takes_part_again_once_it_is_resumed(training: Training, reference_runs, ram: Path, tmp_path: Path):
    run = training(
        cluster={"nodes": 2, "procs_per_node": 1, "device": "cpu"},
        checkpoint=tiers(tmp_path / "disturbed/run", ram),
        train={"steps": STEPS * 100},
    ).start()
    run.reach(2)
    assert "leaves node 1" in command(run, "evacuate", "1")
    wait_for(lambda: members(run)[1:], f"a generation without the node\n{run.logs()}")
    wait_for(lambda: 1 not in run.agents(), "the end of the agent of the node")
    assert "takes node 1 in again" in command(run, "evacuate", "1", "--resume")
    wait_for(lambda: members(run)[2:], f"the return of the node\n{run.logs()}")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    assert members(run) == [2, 1, 2]
    assert [event["name"] for event in run.events("action")] == ["evacuate", "resume", "grow"] and not run.events("fault")


@pytest.mark.soak
def test_a_node_that_is_evacuated_is_left_at_a_step_boundary_and_nothing_is_computed_again(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    run = training(
        entrypoint="paced:train",
        args={"step_s": 0.5},  # until the node was left
        cluster={"nodes": 2, "procs_per_node": 1, "spares": 1, "device": "cpu"},
        checkpoint={**tiers(tmp_path / "disturbed/run", ram), "every_steps": 1000},  # nothing is durable before the end
    ).start()
    run.reach(2)
    wait_for(lambda: len(run.agents()) == 3, "three agents")
    assert "leaves node 1" in command(run, "evacuate", "1")
    wait_for(lambda: len(members(run)) == 2, f"a generation without the node\n{run.logs()}")
    wait_for(lambda: 1 not in run.agents(), "the end of the agent of the node")
    wait_for(lambda: not holds(ram, 1), "the end of what the node held in memory")
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    first, second = run.events("generation_started")
    assert (first["members"], second["members"], second["tier"]) == ([0, 1], [0, 2], "ram")
    assert [event["name"] for event in run.events("action")] == ["evacuate"] and not run.events("fault")
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))  # none of them twice
    same(run, reference_runs("bf16"))
