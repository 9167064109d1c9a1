"""Every invariant of a verdict is broken once, and the verdict says which. Campaigns are told as the ledger would tell them."""

from dataclasses import replace
from typing import Any

import pytest
from broken_campaigns import BREAKS, damaged, first, is_a, lines, without
from campaign_tale import DRIVER, KILLED, NODE, SPIKE, STEPS, STOPPED, Tale, loss, outcomes, usual

from chaos.verdict.verdict import OF_EACH, OF_THE_RUN, Observation, Weights, judge
from resilient.account import account


def test_a_campaign_that_recovers_as_it_should_is_green():
    verdict = judge(usual())
    assert verdict.broken == []
    assert {check.name for check in verdict.checks} == {*OF_EACH, *OF_THE_RUN}
    first, second = verdict.outcomes
    assert (first.culprit, first.kinds, first.taken, first.lost_steps) == ("right", ["exit"], ["restart_workers"], 2)
    assert (first.detection_s, first.downtime_s) == (pytest.approx(0.2), pytest.approx(1.6))
    assert second.lost_steps == 3
    assert verdict.goodput == usual().account.goodput
    assert (verdict.steps, verdict.generations) == (STEPS, 3)


@pytest.mark.parametrize("back", [False, True])
def test_what_a_host_holds_that_was_lost_is_not_left_behind_unless_it_is_back(back: bool):
    seen = usual()
    common = {"t": seen.events[-1]["t"], "generation": 3, "host": "n1"}
    told: list[dict[str, Any]] = [
        {"event": "fault", "fault_id": "g3-1", "kind": "node_lost", "nodes": [1], "ranks": [1], "detail": ""}
    ]
    if back:
        told += [{"event": "generation_started", "members": [0, 1], "nodes": ["n1", "n2"], "world_size": 2, "resumed_step": STEPS}]
    lost = replace(seen, events=[*seen.events, *({**common, **line} for line in told)])
    for file, left in (("n2: /dev/shm/resilient-0-x-node1", back), ("n1: /dev/shm/resilient-0-x-node0", True)):
        assert ("files" in judge(replace(lost, left={"files": [file]})).broken) == left


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_invariant_is_named(name: str):
    broken, change = BREAKS[name]
    verdict = judge(change(usual()))
    assert set(verdict.broken) == broken
    assert not verdict.ok


def test_every_invariant_is_broken_by_some_case():
    assert {each for broken, _ in BREAKS.values() for each in broken} == {*OF_EACH, *OF_THE_RUN}


def test_an_experiment_that_injected_nothing_proves_nothing():
    assert judge(Tale().goes_to(STEPS).ends().seen()).broken == ["injected"]


def test_what_is_wrong_is_said_in_words():
    details = {check.name: check.detail for check in judge(BREAKS["another rank was blamed"][1](usual())).checks}
    assert details["culprit"] == "f1 (worker_kill): exit blames rank 0, and it was rank 1"


# -- jobs that end -----------------------------------------------------------------------------------------------------


def test_a_driver_that_is_killed_ends_its_job_and_no_other_may():
    tale = Tale().goes_to(12).strikes(DRIVER, None, node=None)
    tale.event("committed", step=10, tier="durable")  # nothing that the account would know
    tale.t += 0.1
    tale.ends(-9)
    tale.t += 5
    tale.started()
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert outcomes(seen)[0].lost_steps == 2
    assert outcomes(seen)[0].downtime_s == pytest.approx(8.6)
    assert judge(replace(seen, jobs=[replace(seen.jobs[0], code=-11), seen.jobs[1]])).broken == ["exits"]


def test_a_drained_job_loses_nothing():
    def drained(held: int) -> Observation:
        tale = Tale().goes_to(13).strikes(STOPPED, None)
        tale.tells("preempted", "finish_drain", ranks=[])
        tale.goes_to(14)
        tale.event("snapshot", step=14, tier="memory", stall_s=0.0)
        tale.event("drain", signal="SIGTERM", deadline_s=30, took_s=1.1, step=14)
        tale.ends(75)
        tale.held = held
        tale.t += 5
        tale.started()
        return tale.goes_to(STEPS).ends().seen()

    assert judge(drained(14)).broken == []
    assert outcomes(drained(14))[0].lost_steps == 0


def test_a_kill_during_a_drain_finishes_the_drain():
    tale = Tale().goes_to(13).strikes(STOPPED, None)
    tale.tells("preempted", "finish_drain", ranks=[])
    tale.strikes(KILLED, 1)
    tale.tells("exit", "finish_drain", ranks=[1])
    tale.event("drain", signal="SIGTERM", deadline_s=30, took_s=0.9, step=13)
    tale.ends(75)
    tale.t += 5
    tale.started()
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    calm = without(seen, is_a("drain"))
    assert judge(calm).broken == ["action"]


# -- numbers that may differ -------------------------------------------------------------------------------------------


def test_what_was_rolled_back_is_void_and_what_was_left_out_is_not_missed():
    def spiked(**fields: Any) -> Observation:
        tale = Tale().goes_to(13).strikes(SPIKE)
        tale.goes_to(14)
        tale.metrics[-1]["loss"] = 99.0
        name = tale.tells("loss_spike", "roll_back", step=10, **fields)
        tale.begins(resumed=10)
        return tale.recovers(name, 4).goes_to(STEPS).ends().seen()

    assert judge(spiked(skip=[])).broken == []
    seen = spiked(skip=[[12, 12]])
    kept = [line for line in seen.metrics if line["step"] != 12]
    seen = replace(seen, metrics=kept, account=account(seen.events, kept))
    assert judge(seen).broken == []
    assert judge(replace(seen, events=spiked(skip=[]).events)).broken == ["losses"]


@pytest.mark.parametrize(("tolerance", "broken"), [(0.0, ["losses", "weights"]), (1e-6, [])])
def test_after_shrinking_numbers_are_equal_within_the_tolerance(tolerance: float, broken: list[str]):
    tale = Tale().goes_to(12).strikes(replace(KILLED, actions=frozenset({"restart_workers", "shrink"})))
    name = tale.tells("exit", "restart_workers", "shrink")
    tale.begins(world=1)
    seen = tale.recovers(name, 2).goes_to(STEPS).ends().seen()
    seen = lines(seen, lambda line: line["step"] == 30, {"loss": loss(30) * (1 + 1e-8)}, "metrics")
    seen = replace(seen, weights=Weights(("model/a",), 1e-7), tolerance=tolerance)
    assert judge(seen).broken == broken
    before = lines(seen, lambda line: line["step"] == 5, {"loss": loss(5) * (1 + 1e-8)}, "metrics")
    assert "losses" in judge(before).broken


@pytest.mark.parametrize(("evidence", "step", "broken"), [
    ({"file": "/run/checkpoints/step-00000035/model/a"}, 35, []),
    ({"file": "/run/checkpoints/step-00000030/model/a"}, 35, ["checkpoints"]),
    ({"file": "/run/checkpoints/step-00000040/model/a"}, 40, ["checkpoints"]),
])  # fmt: skip
def test_a_checkpoint_may_stay_as_an_injection_has_spoilt_it_but_the_newest_one_may_not(
    evidence: dict[str, str], step: int, broken: list[str]
):
    seen = first(damaged(step)(usual()), evidence=evidence)
    assert judge(seen).broken == broken


# -- steps that are lost -----------------------------------------------------------------------------------------------


def test_what_was_lost_before_is_not_charged_to_the_next_fault():
    tale = Tale().goes_to(22)
    tale.strikes(replace(KILLED, lost_steps=None))
    name = tale.tells("exit", "restart_workers")
    tale.t += 0.4
    tale.begins(resumed=5)  # all snapshots since were lost
    tale.recovers(name, 17)
    seen = tale.goes_to(12).killed().goes_to(STEPS).ends().seen()
    last = judge(seen).outcomes[-1]
    assert "lost steps" not in last.wrong, last.wrong
    behind = lines(seen, lambda line: line["event"] == "generation_started" and line["resumed_step"] == 10, {"resumed_step": 5})
    assert "lost steps" in judge(behind).outcomes[-1].wrong


@pytest.mark.parametrize(("copied", "gone", "fine"), [(10, 1, True), (15, 1, False), (10, 0, False)])
def test_without_a_node_the_newest_copy_counts(copied: int, gone: int, fine: bool):
    """Snapshots up to 15, of which copies lie elsewhere up to `copied`: the run goes on from step 10, on one node."""
    tale = Tale().goes_to(15)
    tale.event("replicated", step=copied, tier="memory")
    tale.goes_to(17)
    tale.strikes(NODE, None, node=gone)
    name = tale.tells("node_lost", "shrink", nodes=[gone])
    tale.begins(1, resumed=10)
    seen = tale.recovers(name, 7).goes_to(STEPS).ends().seen()
    (only,) = judge(seen).outcomes
    assert ("lost steps" in only.wrong) is not fine, only.wrong
