"""Numbers that go bad, and failures that come again: runs that are rolled back, leave data out, or give up and say why."""

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaigns import HELD, STEPS, Campaign, Training, wait_for, weights

from checkpoint import verify
from resilient import ledger

BAD_AT_ONCE = {"guard": {"max_skips": 0}}
PACED = {"step_s": 0.1, "committed": 10}  # a busy disk is waited for, so that RAM and the durable tier have what they would have


@pytest.fixture
def ram() -> Iterator[Path]:
    """A directory in RAM."""
    path = Path(f"/dev/shm/resilient-test-guards-{random.randrange(1 << 30)}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tiers(ram: Path, run_dir: Path) -> dict[str, Any]:
    durable = {"name": "durable", "path": str(run_dir / "checkpoints")}
    return {"every_steps": 5, "tiers": [{"name": "ram", "path": str(ram), "keep_last": 2}, durable]}


def actions(run: Campaign) -> list[dict[str, Any]]:
    """What the coordinator has done; the trainer recomputes and skips batches by itself."""
    return [event for event in run.events("action") if not event["fault_id"].startswith("batch-")]


def computed(run: Campaign) -> dict[int, set[str]]:
    """Every loss of a step that changed the weights, as text."""
    found: dict[int, set[str]] = {}
    for line in run.metrics():
        if "skipped" not in line:
            found.setdefault(line["step"], set()).add(repr(line["loss"]))
    return found


def same_in_the_end(run: Campaign, reference: Campaign) -> None:
    """Every step has the loss of the run in which nothing happened, and the weights are equal to the last bit."""
    assert computed(run) == reference.losses()
    for name, array in weights(reference).items():
        assert array.tobytes() == weights(run)[name].tobytes(), name


def rejected(run: Campaign) -> set[tuple[int, str]]:
    return {(event["step"], event["tier"]) for event in run.events("checkpoint_rejected")}


def test_weights_that_go_bad_are_rolled_back_past_every_checkpoint_that_has_them_also_with_a_worker_killed_meanwhile(
    training: Training, reference_runs, ram, tmp_path
):
    # The weights are no numbers after step 10, which RAM and the durable tier save so. The way back is what RAM has of before:
    # step 9, unless the machine was so busy that its snapshot was left out. Where it comes to step 10 again, a worker is killed.
    run = training(
        entrypoint="spoilt:train",
        args={"corrupt": 10, "die_at": 10, **PACED},
        resilience=HELD,
        train=BAD_AT_ONCE,
        checkpoint=tiers(ram, tmp_path / "disturbed/run"),
    )
    assert run.run() == 0, run.output + run.logs()
    *rolled, restarted = actions(run)
    assert restarted["name"] == "restart_workers"
    back = rolled[-1]["step"]
    assert back < 10
    assert [(each["name"], each["step"], each["skip"]) for each in rolled] == [("roll_back", 10, []), ("roll_back", back, [])]
    *faults, killed = [event for event in run.events("fault") if not event["fault_id"].startswith("batch-")]
    assert [(fault["kind"], fault["step"]) for fault in faults] == [("not_finite", 11)] * 2
    assert (killed["kind"], killed["detail"]) == ("exit", "SIGKILL")
    assert (10, "durable") in rejected(run)
    *before, last = [event["resumed_step"] for event in run.events("generation_started")]
    told = [event["step"] for event in run.events("snapshot") if (event["tier"], event["generation"]) == ("ram", 3)]
    assert before == [0, 10, back] and max([back, *told]) <= last < 10
    assert {event["fault_id"] for event in run.events("recovered")} == {fault["fault_id"] for fault in (*faults, killed)}
    aside = run.run_dir / "checkpoints" / "step-00000010.rolled-back-1"
    assert aside.is_dir()
    same_in_the_end(run, reference_runs("bf16"))
    verify(run.run_dir / "checkpoints" / f"step-{STEPS:08}")


@pytest.mark.soak
def test_data_that_is_bad_whatever_the_weights_is_left_out_and_the_run_reaches_its_end(training: Training, ram, tmp_path):
    run = training(
        entrypoint="spoilt:train",
        args={"bad": [13, 14], **PACED},
        resilience=HELD,
        train={"guard": {"max_skips": 1}},
        checkpoint=tiers(ram, tmp_path / "disturbed/run"),
    )
    assert run.run() == 0, run.output + run.logs()
    # To what RAM had, mostly steps 12 and 11 (of 13, which was skipped, it took no snapshot), then to the durable one.
    ram_had = sorted(each["step"] for each in run.events("snapshot") if each["tier"] == "ram" and each["generation"] == 1)[-2:]
    assert ram_had[-1] in (11, 12)
    back = sorted({*ram_had, 10}, reverse=True)
    told = [(each["name"], each["step"], each["skip"]) for each in actions(run)]
    assert told == [("roll_back", step, [[13, 14]] if step == 10 else []) for step in back]
    assert "left out" in actions(run)[-1]["reason"]
    last = {line["step"]: line for line in run.metrics()}
    assert [step for step, line in last.items() if line.get("skipped") == "rolled_back"] == [13, 14]
    assert last[14]["samples"] == 14 * 8
    # The same weights as a run that skips the two batches by itself.
    other = training(tmp_path / "other", entrypoint="spoilt:train", args={"bad": [13, 14]})
    assert other.run() == 0, other.output + other.logs()
    for name, array in weights(other).items():
        if not name.startswith("random"):
            assert array.tobytes() == weights(run)[name].tobytes(), name


def written_before(run: Campaign, step: int, skip: list[list[int]]) -> None:
    """The driver was killed as soon as it had decided to roll back."""
    generation = max(event["generation"] for event in run.events())
    fields = {"fault_id": "g1-1", "name": "roll_back", "reason": "as a driver before this one said", "step": step, "skip": skip}
    with ledger.Ledger(run.run_dir) as lines:
        lines.event("action", fields, generation=generation)


@pytest.mark.soak
def test_a_run_after_a_driver_that_died_in_the_middle_of_a_roll_back_completes_it(
    training: Training, reference_runs, ram, tmp_path
):
    config = {"args": PACED, "resilience": HELD, "checkpoint": tiers(ram, tmp_path / "disturbed/run")}
    run = training(entrypoint="spoilt:train", **config).start()
    run.reach(12)
    run.kill()
    wait_for(lambda: not run.processes(), "the processes' end")
    written_before(run, 5, [])
    assert run.run() == 0, run.output + run.logs()
    assert run.events("generation_started")[-1]["resumed_step"] == 5
    assert (10, "durable") in rejected(run)
    same_in_the_end(run, reference_runs("bf16"))


@pytest.mark.soak
def test_numbers_that_stay_bad_end_the_run_after_as_many_roll_backs_as_are_allowed(training: Training):
    run = training(
        entrypoint="spoilt:train",
        args={"corrupt": 3, "times": 9},
        train=BAD_AT_ONCE,
        resilience={"max_roll_backs": 1},
        checkpoint={"every_steps": 2, "memory_cost": 0},  # step 3, which RAM would have, is bad already
    )
    assert run.run() == 70
    assert [each["name"] for each in actions(run)] == ["roll_back", "give_up"]
    assert "bad since step 4" in run.output
    assert "rolled back to step 2" in run.output


@pytest.mark.soak
def test_a_batch_that_ends_a_rank_by_a_signal_gives_up_and_says_where(training: Training):
    run = training(entrypoint="spoilt:train", args={"poison": 7, "step_s": 0.1})
    assert run.run() == 70
    assert "the same failure (SIGSEGV) at step 7 for the third time: no attempt passed it" in run.output
    page = (run.run_dir / "diagnosis.md").read_text()
    assert "exit 70" in page
    assert "rank 1 on node 0" in page
    assert "step 7, phase" in page
    assert page.count("SIGSEGV") > 1
    steps = [fault["step"] for fault in run.events("fault")]
    assert steps.count(7) == 3 and set(steps) <= {7, None}, steps  # None: it ended before any rank had said where it starts
    assert page.count("restart workers") == len(steps) - 1
    assert all((run.run_dir / name).exists() for name in re.findall(r"- (logs/\S+)", page))
    assert "diagnosis.md" in run.output


@pytest.mark.soak
def test_failures_that_move_on_with_the_run_do_not_count_and_those_that_differ_at_one_step_give_up_naming_all_of_them(counting):
    run = counting("fickle", args={"fail_at": [12, 15, 22, 25, 33], "stuck_at": 45}, resilience={"give_up_after_same_step": 2})
    assert run.run() == 70
    assert [event["step"] for event in run.events("fault")] == [12, 15, 22, 25, 33, 45, 45, 45, 45]
    assert all("failures without progress" not in event["reason"] for event in run.events("action")[:5])
    assert "4 attempts ended at step 45" in run.output
    for number in range(5, 9):
        assert f"Fickle{number}" in run.output
    assert "Fickle4" not in run.output.partition("4 attempts")[2]


@pytest.mark.soak
def test_a_script_with_checkpoints_of_its_own_is_told_where_to_go_back_to_and_what_to_leave_out_also_in_later_runs(counting):
    run = counting("own_checkpoints", steps=30, args={"bad": 14})
    assert run.run() == 0, run.output + run.logs()
    assert [(each["step"], each["skip"]) for each in run.events("action")] == [(13, []), (12, []), (11, [[14, 14]])]
    assert [event["resumed_step"] for event in run.events("generation_started")] == [0, 13, 12, 11]
    assert run.events("fault")[0]["kind"] == "loss_spike"
    faults = len(run.events("fault"))
    for step in range(12, 31):  # as if the job had ended before
        (run.run_dir / f"own.{step}").unlink()
    assert run.run("train.steps=31") == 0, run.output + run.logs()
    assert run.events("generation_started")[-1]["resumed_step"] == 11
    assert len(run.events("fault")) == faults
    assert run.step() == 31
