"""Campaigns whose state goes through tiers: real file systems that are full, read-only, slow or gone; nodes that lose theirs."""

import contextlib
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

import psutil
import pytest
from campaigns import EVERY, MOUNTS, STEPS, Campaign, Training, holding, loses_no_snapshot, same, wait_for
from soak import soaked

from checkpoint import verify

LATE = STEPS - 8  # a step from which a run goes on once all has been done to it


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory in RAM; nothing of the campaign may be left in it."""
    path = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tiers(
    run_dir: Path, ram: Path, nvme: Path | None = None, *, durable: Path | None = None, **of_the_durable: Any
) -> dict[str, Any]:
    """A tier in RAM at every step, perhaps one on a node's disk, and the durable one."""
    found: list[dict[str, Any]] = [{"name": "ram", "path": str(ram), "keep_last": 2, "replicas": 1}]
    if nvme is not None:
        found.append({"name": "nvme", "path": str(nvme), "every_steps": 3, "replicas": 1})
    where = durable or run_dir / "checkpoints"
    return {"every_steps": EVERY, "tiers": [*found, {"name": "durable", "path": str(where), **of_the_durable}]}


def storage_faults(run: Campaign) -> list[dict[str, Any]]:
    return [event for event in run.events("fault") if event["kind"] == "storage"]


def taken(run: Campaign, tier: str) -> list[int]:
    """The steps of which a tier has held all parts."""
    return [event["step"] for event in run.events("snapshot") if event["tier"] == tier]


def test_killed_workers_and_a_killed_driver_go_on_from_the_newest_snapshot_that_ram_holds(
    training: Training, reference_runs, ram: Path, tmp_path: Path, rounds: int
):
    run = training(checkpoint=tiers(tmp_path / "disturbed/run", ram), **holding(LATE, give_up_after_same_step=9)).start()
    chance = random.Random(rounds)
    for kill, step in enumerate(sorted(chance.sample(range(3, STEPS - 12), rounds))):
        run.reach(step)
        wait_for(lambda: taken(run, "ram"), "a snapshot")
        wait_for(lambda kill=kill: len(run.events("recovered")) >= kill, "recovery from the kill before")
        pids = wait_for(lambda: len(found := run.workers()) == 2 and found, "two workers")
        os.kill(pids[chance.randrange(2)], signal.SIGKILL)
    wait_for(lambda: len(run.events("recovered")) == rounds, "recovery")
    run.reach(killed := min(run.step() + 3, LATE))
    wait_for(lambda: max(taken(run, "ram"), default=0) >= killed - 1, "a snapshot of it")
    run.kill()
    wait_for(lambda: not run.processes(), "the processes' end")
    run.go_on()
    assert run.run() == 0, run.output + run.logs()
    started = run.events("generation_started")[1:]
    assert [event["tier"] for event in started] == ["ram"] * (rounds + 1)
    assert started[-1]["resumed_step"] >= killed - 1
    loses_no_snapshot(run)
    assert not storage_faults(run), storage_faults(run)
    same(run, reference_runs("bf16"))
    assert not ram.exists() or not any(ram.iterdir())


@pytest.mark.soak
def test_what_ram_holds_of_a_dead_run_is_flushed_by_a_command(training: Training, ram: Path, tmp_path: Path):
    run = training(checkpoint={**tiers(tmp_path / "disturbed/run", ram), "every_steps": 1000}, **holding(LATE)).start()
    wait_for(lambda: max(taken(run, "ram"), default=0) >= 12, "a snapshot")
    command = [sys.executable, "-m", "resilient", "ckpt", "flush", str(run.run_dir)]
    alive = subprocess.run(command, check=False, capture_output=True, text=True)
    assert alive.returncode == 69
    assert "in use by pid" in alive.stderr
    run.kill()
    wait_for(lambda: not run.processes(), "the processes' end")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (run.run_dir / "checkpoints").glob("step-*")
    verify(path)
    assert int(path.name[5:]) >= 11
    run.go_on()
    assert run.run() == 0, run.output + run.logs()


def test_a_killed_snapshot_daemon_costs_nothing(training: Training, reference_runs, ram: Path, tmp_path: Path, rounds: int):
    run = training(checkpoint=tiers(tmp_path / "disturbed/run", ram, tmp_path / "nvme")).start()
    chance = random.Random(rounds)
    for step in sorted(chance.sample(range(2, STEPS - 2), 2 * rounds)):
        run.reach(step)
        time.sleep(chance.random() * 0.1)  # at any moment of a step
        for process in run.processes():
            if "checkpoint.daemon" in " ".join(process.cmdline()):
                process.kill()
    assert run.wait() == 0, run.output + run.logs()
    kinds = [event["kind"] for event in run.events("fault")]
    assert not [kind for kind in kinds if kind != "storage"], kinds
    assert len(run.events("generation_started")) == 1
    same(run, reference_runs("bf16"))


def agent(run: Campaign, node: int) -> psutil.Process:
    """The agent of a node."""

    found = wait_for(lambda: run.agents().get(node), "the agent")
    assert found is not None
    return found


@pytest.mark.soak
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_loses_ram_and_disk_while_it_is_down_is_restored_from_its_buddy(
    training: Training, reference_runs, ram: Path, tmp_path: Path, node: int
):
    kept = tiers(tmp_path / "disturbed/run", ram, tmp_path / "nvme")
    run = training(
        cluster={"nodes": 2, "procs_per_node": 1, "device": "cpu"},
        checkpoint={**kept, "every_steps": 1000},  # nothing is durable before the end
        **holding(LATE),
    ).start()
    run.reach(15)
    wait_for(lambda: any(ram.glob(f"*/node{1 - node}/replica-*/step-????????/part.json")), "a copy of what it holds")
    victim = agent(run, node)
    victim.suspend()  # so that nothing is started anew before everything is gone
    for process in victim.children(recursive=True):
        process.kill()
    for root in (*ram.glob(f"*/node{node}"), *(tmp_path / "nvme").glob(f"*/node{node}")):
        shutil.rmtree(root)
    victim.kill()
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    (lost,) = [event for event in run.events("fault") if event["kind"] == "node_lost"]
    assert lost["nodes"] == [node]
    # What only the buddy held may have been made durable by it meanwhile, but nothing was before.
    assert not [event for event in run.events("committed") if event["t"] < lost["t"]]
    assert run.events("generation_started")[1]["resumed_step"] > 0
    same(run, reference_runs("bf16"))


def test_workers_that_are_stopped_while_a_run_stops_lose_nothing_that_the_agents_hold(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    run = training(checkpoint=tiers(tmp_path / "disturbed/run", ram), **holding(15, drain_s=8.0)).start()
    wait_for(lambda: max(taken(run, "ram"), default=0) > 10, "a snapshot")
    for pid in run.workers().values():
        os.kill(pid, signal.SIGSTOP)  # for good
    held = max(taken(run, "ram"))
    run.signal(signal.SIGTERM)
    goes_on(run, held, reference_runs("bf16"))


@pytest.mark.soak
def test_a_worker_that_is_killed_while_a_run_stops_loses_nothing_that_the_agents_hold(
    training: Training, reference_runs, ram: Path, tmp_path: Path
):
    run = training(checkpoint=tiers(tmp_path / "disturbed/run", ram), **holding(15, drain_s=8.0)).start()
    wait_for(lambda: max(taken(run, "ram"), default=0) > 10, "a snapshot")
    pids = run.workers()
    run.signal(signal.SIGTERM)
    os.kill(pids[1], signal.SIGKILL)
    goes_on(run, 11, reference_runs("bf16"))


def goes_on(run: Campaign, held: int, reference: Campaign) -> None:
    """It stops with the step durable that it held, and comes to its end when it is started again."""
    assert run.wait() == 75, run.output + run.logs()
    assert max(event["step"] for event in run.events("committed")) >= held > 10
    run.go_on()
    assert run.run() == 0, run.output + run.logs()
    same(run, reference)


@contextlib.contextmanager
def paused(run: Campaign) -> Iterator[None]:
    """Training stands still, so that it is not over before something has been done to it."""
    pids = list(run.workers().values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# -- file systems that fail ----------------------------------------------------------------------------------------------


@MOUNTS
@pytest.mark.parametrize("what", ["bytes", soaked("inodes"), soaked("read-only")])
def test_a_durable_tier_that_fails_does_not_stop_training_and_comes_back_by_itself(
    training: Training, reference_runs, ram: Path, tmp_path: Path, volume, what: str
):
    where = volume(mib=64, inodes=2000)
    run = training(
        checkpoint=tiers(tmp_path / "disturbed/run", ram, durable=where / "checkpoints"),
        train={"eval_interval": 0},
        **holding(LATE),
    ).start()
    run.reach(8)
    filler = where / "filler"
    with paused(run):
        if what == "bytes":
            subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=1M"], check=False, stderr=subprocess.DEVNULL)
        elif what == "inodes":
            filler.mkdir()
            with contextlib.suppress(OSError):
                for number in range(3000):
                    (filler / str(number)).touch()
        else:
            # Busy for as long as the snapshot daemon, which does not stand still, has a file open there.
            remount = ["mount", "-o", "remount,ro", str(where)]
            wait_for(lambda: subprocess.run(remount, check=False, stderr=subprocess.DEVNULL).returncode == 0, "the remount")
    fault = wait_for(lambda: storage_faults(run), "the fault of the tier")[0]
    assert "durable" in fault["detail"]
    run.reach(min(run.step() + 2, LATE))  # training goes on
    with paused(run):  # a worker that dies meanwhile is recovered from RAM
        os.kill(run.workers()[0], signal.SIGKILL)
    wait_for(lambda: any(event["kind"] != "storage" for event in run.events("fault")), "the fault of the worker")
    wait_for(lambda: len(run.events("generation_started")) == 2, "the recovery")
    assert run.events("generation_started")[1]["tier"] == "ram"
    if what == "read-only":
        subprocess.run(["mount", "-o", "remount,rw", str(where)], check=True)
    else:
        shutil.rmtree(filler) if filler.is_dir() else filler.unlink()
    run.go_on()
    assert run.wait() == 0, run.output + run.logs()
    assert run.losses() == reference_runs("bf16").losses()
    assert run.events("committed")[-1]["step"] == STEPS
    verify(where / f"checkpoints/step-{STEPS:08}")


@pytest.mark.soak
@MOUNTS
def test_a_node_tier_that_is_full_is_left_out_and_training_goes_on(
    training: Training, reference_runs, ram: Path, tmp_path: Path, volume
):
    where = volume(mib=8, inodes=2000)
    subprocess.run(["dd", "if=/dev/zero", f"of={where / 'filler'}", "bs=64k"], check=False, stderr=subprocess.DEVNULL)
    run = training(checkpoint=tiers(tmp_path / "disturbed/run", ram, where / "nvme"))
    assert run.run() == 0, run.output + run.logs()
    assert "nvme" in storage_faults(run)[0]["detail"]
    assert not taken(run, "nvme")
    same(run, reference_runs("bf16"))


@pytest.mark.soak
@MOUNTS
def test_ram_without_room_moves_the_buffers_to_a_slower_tier(training: Training, reference_runs, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        run = training(checkpoint=tiers(tmp_path / "disturbed/run", small, tmp_path / "nvme"))
        assert run.run() == 0, run.output + run.logs()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert "ram" in storage_faults(run)[0]["detail"]
    assert run.events("committed")[-1]["step"] == STEPS
    same(run, reference_runs("bf16"))


@MOUNTS
def test_with_no_room_on_any_tier_the_run_ends_and_says_so(training: Training, tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        run = training(checkpoint=tiers(tmp_path / "disturbed/run", small / "ram", durable=small / "durable"))
        assert run.run() == 69, run.output + run.logs()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert "room" in run.output
    assert "Traceback" not in run.output


@pytest.mark.alone
def test_a_tier_a_hundred_times_too_slow_does_not_slow_training(training: Training, reference_runs, ram: Path, tmp_path: Path):
    # A state of 1.6 MiB in 0.3 s steps; at this rate a checkpoint takes as long as half the training.
    run = training(checkpoint=tiers(tmp_path / "disturbed/run", ram, max_mib_s=1.0))
    assert run.run() == 0, run.output + run.logs()
    held = taken(run, "ram")  # every step, but for one or the other if the machine is busy
    assert len(held) > 0.9 * STEPS and held[-1] == STEPS, held
    assert run.events("committed")[-1]["step"] == STEPS
    same(run, reference_runs("bf16"))


@pytest.mark.soak
def test_a_durable_tier_that_stays_broken_ends_unusable_and_says_where_the_state_is(training: Training, ram: Path, tmp_path: Path):
    run = training(checkpoint=tiers(tmp_path / "disturbed/run", ram), **holding(LATE, drain_s=3.0)).start()
    run.reach(7)
    durable = run.run_dir / "checkpoints"
    aside = durable.with_name("elsewhere")
    with paused(run):
        durable.rename(aside)
        durable.write_text("not a directory")
    run.go_on()
    assert run.wait() == 69, run.output + run.logs()
    assert "could not be made durable" in run.output
    durable.unlink()
    aside.rename(durable)
    assert run.run() == 0, run.output + run.logs()
    assert run.events("committed")[-1]["step"] == STEPS


def test_a_job_whose_durable_tier_is_away_or_another_one_is_refused_and_begins_nothing_anew(campaign: Any, tmp_path: Path):
    where, other = tmp_path / "scratch", tmp_path / "other"
    run: Campaign = campaign(
        entrypoint="keeping:train",
        args={"step_s": 0.0},
        cluster={"procs_per_node": 1, "device": "cpu"},
        checkpoint={"every_steps": EVERY, "tiers": [{"name": "durable", "path": str(where)}]},
        train={"steps": 10},
    )
    assert run.run() == 0, run.output + run.logs()
    before, said = run.events(), f"step 10 was committed on {where}"
    where.rename(tmp_path / "away")
    assert run.run("train.steps=20") == 69, run.output
    assert said in run.output and "is it mounted?" in run.output and not where.exists()
    assert run.run("train.steps=20", f"checkpoint.tiers.0.path={other}") == 78, run.output
    assert said in run.output and "command line: checkpoint.tiers.0.path = " in run.output and f"is in {other}:" in run.output
    assert not other.exists()
    assert run.events() == before and "Traceback" not in run.output
