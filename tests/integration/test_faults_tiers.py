"""Faults of storage, checkpoints and jobs: each is done by an injector to a campaign that runs, seen to happen and to be undone."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from campaigns import MOUNTS, Campaign, wait_for
from injectors import injector, strike
from keeping import advance, beginning

from chaos.primitives.mounts import mounted, options
from chaos.primitives.tiers import free
from checkpoint import verify
from resilient import storage

EVERY = 10
PATIENCE_S = 300.0
COPY_S = 20.0
Keeping = Callable[..., Campaign]


def until(run: Campaign, holds: Callable[[], Any], why: str) -> Any:
    """Wait for something that a campaign does; it must not end before."""
    assert run.process is not None
    deadline = time.monotonic() + PATIENCE_S
    while not (got := holds()):
        if run.process.poll() is not None and not holds():
            run.wait()
            pytest.fail(f"the campaign ended before {why}\n{run.output}\n{run.logs()}")
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_S:.0f} s in vain: {why}\n{run.logs()}")
        time.sleep(0.05)  # ledgers of many steps are read as a whole
    return got


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory in RAM; nothing of the campaign may be left in it."""
    path = Path(f"/dev/shm/resilient-test-{os.getpid()}-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def keeping(campaign: Callable[..., Campaign], ram: Path) -> Keeping:
    """A campaign of the toy that has a state, with snapshots in RAM at every step."""

    def make(steps: int = 100_000, *, durable: Path | None = None, directory: Path | None = None, **changes: Any) -> Campaign:
        tiers = [
            {"name": "ram", "path": str(changes.pop("memory", ram)), "keep_last": 2, "replicas": 1},
            *changes.pop("between", []),
            {"name": "durable", "path": str(durable or "${run_dir}/checkpoints"), "keep_last": 100},
        ]
        return campaign(
            directory,
            entrypoint="keeping:train",
            cluster={"procs_per_node": 2, "device": "cpu", **changes.pop("cluster", {})},
            train={"steps": steps},
            checkpoint={"every_steps": EVERY, "tiers": tiers},
            chaos={"allow": True},
            **changes,
        )

    return make


def committed(run: Campaign) -> list[int]:
    return [event["step"] for event in run.events("committed")]


def recoveries(run: Campaign) -> list[dict[str, Any]]:
    """Those that had ranks started anew."""
    return [event for event in run.events("recovered") if event["fault_id"].startswith("g")]


def rejected(run: Campaign) -> list[tuple[int, str]]:
    return [(event["step"], event["tier"]) for event in run.events("checkpoint_rejected")]


def held(run: Campaign) -> list[int]:
    """Steps that RAM has held."""
    return [event["step"] for event in run.events("snapshot") if event["tier"] == "ram"]


def replicated(run: Campaign) -> int:
    """The newest step of which both nodes hold the other one's part in RAM."""
    newest: dict[str, int] = {}
    for path in Path(run.config["checkpoint"]["tiers"][0]["path"]).glob("**/replica-*/step-????????/part.json"):
        owner, step = path.parts[-3], int(path.parts[-2][5:])
        newest[owner] = max(newest.get(owner, 0), step)
    return min(newest.values()) if len(newest) == 2 else 0


def well(run: Campaign) -> None:
    """Stop it, further than it ever was: each step has the loss of an undisturbed run, and the last one has a checkpoint."""
    furthest = max(run.losses())
    until(run, lambda: run.step() > furthest, "more than there was")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.output + run.logs()
    losses = run.losses()
    assert losses == {step: {repr(loss)} for step, loss in reference(max(losses))}
    (last,) = run.events("run_finished")[-1:]
    verify(Path(storage.read(run.run_dir)["tiers"][-1]["roots"][0]) / f"step-{last['step']:08}")
    assert last["step"] == max(losses)


def reference(steps: int) -> Iterator[tuple[int, float]]:
    """Steps and losses of the toy, computed in one process."""
    ranks = [beginning(rank) for rank in range(2)]
    for step in range(1, steps + 1):
        yield step, (ranks[0].sum() + ranks[1].sum()).item()
        for numbers in ranks:
            advance(numbers)


# -- checkpoints that are damaged --------------------------------------------------------------------------------------


@pytest.mark.soak
def test_damaged_checkpoints_are_passed_over_and_the_one_before_is_gone_on_from(keeping: Keeping):
    run = keeping(args={"late_s": 0.02}).start()  # which would finish a sound snapshot after the one that was damaged
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
        until(run, lambda number=number: len(recoveries(run)) == number + 1, f"the recovery from {fault}")
        wrong = step + 1 if fault == "stale_latest" else step
        new = rejected(run)[len(before) :]
        assert new == [(wrong, evidence["tier"])], (fault, evidence, new)
        started = run.events("generation_started")[-1]
        # What was flushed meanwhile may have taken the place in RAM of the snapshot before the one that was damaged.
        assert started["tier"] in ("durable", evidence["tier"]), (fault, started)
        # The step itself is sound where only RAM's copy was damaged, and another tier has it.
        usable = [each for each in committed(run) if each < wrong + (evidence["tier"] == "ram")]
        assert max(usable, default=0) <= started["resumed_step"], (fault, started)
        assert started["resumed_step"] < wrong or (started["tier"] == "durable" and wrong in usable), (fault, started)
        blamed = [event for event in run.events("fault") if event["kind"] != "storage"][-1]
        assert (blamed["kind"], blamed["ranks"]) == ("exit", [1]), blamed
    well(run)


@pytest.mark.soak
def test_a_stop_after_a_damaged_checkpoint_loses_nothing(keeping: Keeping):
    run = keeping().start()
    until(run, lambda: len(committed(run)) >= 3, "checkpoints")
    step = strike(run, "torn_write", rank=0, node=0)["step"]
    until(run, lambda: recoveries(run), "the recovery")
    run.signal(signal.SIGTERM)  # before it is where it was
    assert run.wait() == 75, run.output + run.logs()
    last = run.events("run_finished")[-1]["step"]
    assert run.events("generation_started")[-1]["resumed_step"] < step
    run.start()
    until(run, lambda: len(run.events("generation_started")) == 3, "the next start")
    assert run.events("generation_started")[-1]["resumed_step"] == last
    well(run)


# -- snapshots that are lost -------------------------------------------------------------------------------------------


def stopped_with_copies(run: Campaign, pids: Iterable[int]) -> bool:
    """Stop ranks, and say whether copies of the newest snapshot are there then: one may be stopped while it takes it."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + COPY_S
    while replicated(run) < run.step() - 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    return replicated(run) >= run.step() - 1


@pytest.mark.soak
def test_a_node_that_loses_its_snapshots_takes_new_ones_and_with_replicas_a_worker_that_dies_then_costs_a_step(keeping: Keeping):
    run = keeping(cluster={"nodes": 2, "procs_per_node": 1}).start()
    for node in (0, 1):
        until(run, lambda: len(committed(run)) >= 2, "checkpoints")
        evidence = strike(run, "snapshot_lost", node=node)
        lost = int(evidence["held"][-1][5:])
        until(run, lambda lost=lost: max(held(run)) > lost + 5, "new snapshots")
    assert len(run.events("generation_started")) == 1
    assert {event["kind"] for event in run.events("fault")} <= {"storage"}
    pids = run.workers()
    while not stopped_with_copies(run, pids.values()):
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
        step = run.step()
        until(run, lambda step=step: run.step() > step + 1, "further steps")
    strike(run, "snapshot_lost", node=0)
    os.kill(pids[1], signal.SIGKILL)
    os.kill(pids[0], signal.SIGCONT)
    until(run, lambda: recoveries(run), "the recovery")
    (recovered,) = recoveries(run)
    assert recovered["lost_steps"] <= 2, recovered
    assert run.events("generation_started")[-1]["tier"] == "ram"
    well(run)


# -- tiers that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_directory_that_is_gone_for_a_while_is_told_and_comes_back_and_what_others_share_is_left_alone(
    keeping: Keeping, tmp_path: Path
):
    run = keeping(durable=tmp_path / "durable").start()
    until(run, lambda: len(committed(run)) >= 2, "checkpoints")
    for fault in ("tier_full", "tier_no_inodes", "tier_read_only", "tier_hanging", "tier_slow"):
        with injector(run, fault, node=0) as sent:
            assert "same file system" in sent.answer("failed")["reason"], fault
    assert not troubles(run)
    for killed in (False, True):
        before = set(tmp_path.joinpath("durable").glob("step-????????"))
        with injector(run, "tier_gone", node=0, for_s=600.0) as sent:
            wait_for(lambda: not (tmp_path / "durable").exists(), "the tier to be gone")
            fault_id = told(run)
            recovered_from_ram(run)
            assert not (tmp_path / "durable").exists()  # nothing was made in its place
            sent.kill() if killed else sent.over()
            wait_for((tmp_path / "durable").exists, "the tier to be back")
            assert before <= set(tmp_path.joinpath("durable").glob("step-????????"))
        back(run, fault_id)
    assert not list(tmp_path.glob(".durable-gone-*"))
    well(run)


def told(run: Campaign) -> str:
    """The ledger tells that the durable tier has failed, and training goes on; the id of the fault."""
    well_again = {event["fault_id"] for event in run.events("recovered")}
    fault = until(run, lambda: [event for event in troubles(run) if event["fault_id"] not in well_again], "the tier's fault")[0]
    assert fault["detail"].startswith("tier durable"), fault
    actions = until(
        run, lambda: [event for event in run.events("action") if event["fault_id"] == fault["fault_id"]], "what is done"
    )
    assert [event["name"] for event in actions] == ["degrade_tier"]
    run.reach(run.step() + 5)
    return str(fault["fault_id"])


def back(run: Campaign, fault_id: str) -> None:
    """It is well again, by itself."""
    until(run, lambda: any(event["fault_id"] == fault_id for event in run.events("recovered")), "the tier's recovery")
    last = max(committed(run))
    until(run, lambda: max(committed(run)) > last, "another checkpoint")


def recovered_from_ram(run: Campaign) -> None:
    """A worker is killed meanwhile, and that costs no more than ever."""
    count = len(run.events("generation_started"))
    os.kill(run.workers()[1], signal.SIGKILL)
    until(run, lambda: len(run.events("generation_started")) > count, "the recovery of a worker")
    assert run.events("generation_started")[-1]["tier"] == "ram"
    run.reach(run.step() + 5)


def troubles(run: Campaign) -> list[dict[str, Any]]:
    return [event for event in run.events("fault") if event["kind"] == "storage"]


def frozen(path: Path) -> bool:
    """Whether a write does not come back; a process that waits for it is left behind until it does."""
    process = subprocess.Popen(["touch", str(path / "touched")])
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        return True
    return False


LOOKS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], bool]]] = {
    "tier_full": (lambda path: free(path)[0] < 1 << 16, lambda path: free(path)[0] > 1 << 20),
    "tier_no_inodes": (lambda path: free(path)[1] == 0, lambda path: free(path)[1] > 100),
    "tier_read_only": (lambda path: "ro" in options(path), lambda path: mounted(path) and "ro" not in options(path)),
    "tier_gone": (lambda path: not mounted(path), mounted),
    "tier_hanging": (frozen, lambda path: not frozen(path)),
    "tier_slow": (frozen, lambda path: not frozen(path)),
}
"""Of each fault: that a file system is struck by it, and that it is not any more."""


@pytest.mark.soak
@MOUNTS
def test_file_systems_that_fail_do_not_stop_training_and_come_back_also_when_the_injector_is_killed(keeping: Keeping, volume):
    where = volume(mib=32, inodes=1000)
    run = keeping(durable=where / "checkpoints").start()
    until(run, lambda: len(committed(run)) >= 2, "checkpoints")
    for fault, (struck, mended) in LOOKS.items():
        for killed in (False, True):
            with injector(
                run, fault, node=0, for_s=600.0, **({"factor": 50.0, "period_s": 4.0} if fault == "tier_slow" else {})
            ) as sent:
                wait_for(lambda struck=struck: struck(where), f"{fault} to happen")
                fault_id = ""
                if fault == "tier_hanging":
                    last = max(committed(run))
                    run.reach(run.step() + 4 * EVERY)
                    assert max(committed(run)) <= last + EVERY  # one may have been told late
                elif fault != "tier_slow":
                    fault_id = told(run)
                    assert struck(where)
                if not killed:
                    recovered_from_ram(run)
                sent.kill() if killed else sent.over()
                wait_for(lambda mended=mended: mended(where), f"{fault} to be undone")
            last = max(committed(run))
            until(run, lambda last=last: max(committed(run)) > last, f"a checkpoint after {fault}")
            if fault_id:
                back(run, fault_id)
    well(run)


# -- jobs that end -----------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_stops_that_are_asked_for_lose_no_step_and_sudden_ends_no_more_than_one(keeping: Keeping):
    run = keeping().start()
    count = 1
    for fault, params in [
        ("sigterm", {}),
        ("usr1", {}),
        ("ctrl_c", {}),
        ("ctrl_c", {"times": 2}),
        ("sigterm", {"grace_s": 0.2}),
    ]:
        until(run, lambda count=count: len(run.events("generation_started")) == count, "the start")
        run.reach(run.step() + 15)
        short = "grace_s" in params
        if short:
            for process in run.processes():
                if "checkpoint.daemon" in " ".join(process.cmdline()):
                    process.suspend()  # so that nothing more becomes durable
        held_before = max(held(run))
        assert strike(run, fault, **params)["state"] == ("killed" if short else "ended"), fault
        assert run.wait() == (-signal.SIGKILL if short else 75), run.output + run.logs()
        reached = run.step()
        run.start()
        count += 1
        until(run, lambda count=count: len(run.events("generation_started")) == count, f"the start after {fault}")
        resumed = run.events("generation_started")[-1]["resumed_step"]
        if params:
            assert resumed >= held_before - 1, fault
        else:
            assert resumed == run.events("run_finished")[-1]["step"] == run.events("drain")[-1]["step"] == reached, fault
    well(run)
