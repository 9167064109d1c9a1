"""Which fault of a campaign's ledger is of which injection."""

from copy import deepcopy
from dataclasses import replace

import pytest
from campaign_tale import DRIVER, KILLED, LINK, SPIKE, STEPS, STORAGE, Tale, outcomes

from chaos.fault import Expectation
from chaos.verdict.verdict import Observation, judge


def test_a_kill_while_another_is_recovered_from_is_an_injection_of_its_own():
    tale = Tale().goes_to(12).strikes(KILLED, 0)
    one = tale.tells("exit", "restart_workers", ranks=[0])
    tale.begins()
    tale.strikes(KILLED, 0)
    two = tale.tells("exit", "restart_workers", ranks=[0])
    tale.t += 0.5
    tale.begins()
    tale.recovers(one, 2)
    tale.event("recovered", fault_id=two, step=11, downtime_s=1.0, lost_steps=0)
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert [each.covered_by for each in outcomes(seen)] == ["", ""]
    assert [each.lost_steps for each in outcomes(seen)] == [2, 0]


def test_of_two_at_once_one_may_be_told_of():
    tale = Tale().goes_to(12).strikes(KILLED, 0)
    seen = tale.killed(1).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert [(each.covered_by, each.culprit) for each in outcomes(seen)] == [("f2", "not asked"), ("", "right")]


def test_one_that_nobody_told_of_is_not_covered_by_another_that_is_long_over():
    seen = Tale().goes_to(12).killed(1).goes_to(20).strikes(KILLED, 0).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == ["reported"]


def test_the_wrong_rank_is_wrong_even_if_it_was_the_right_one_before():
    tale = Tale().goes_to(12).killed(0).goes_to(20).strikes(KILLED, 1)
    name = tale.tells("exit", "restart_workers", ranks=[0])
    tale.begins()
    seen = tale.recovers(name).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == ["culprit"]
    assert [each.culprit for each in outcomes(seen)] == ["right", "wrong"]


def test_what_is_wrong_with_storage_may_be_told_again_and_again():
    tale = Tale().goes_to(12).strikes(STORAGE, None, lasts_s=3)
    for name in ("s1", "s2"):
        tale.tells("storage", "degrade_tier", ranks=[], name=name)
        tale.goes_to(tale.step + 4).recovers(name)
    seen = tale.goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert [each.faults for each in outcomes(seen)] == [["s1", "s2"]]


@pytest.mark.parametrize("passes", [True, False])
def test_a_tier_that_is_never_well_again_was_not_recovered_from_until_the_next_job(passes: bool):
    tale = Tale().goes_to(12).strikes(replace(STORAGE, may_pass=passes), None, lasts_s=3)
    tale.tells("storage", "degrade_tier", ranks=[], name="s1")
    tale.goes_to(20)
    ended = deepcopy(tale)
    verdict = judge(tale.goes_to(STEPS).ends().seen())
    assert verdict.broken == ["recovered"]
    assert verdict.outcomes[0].wrong == {"recovered": "storage (s1) was not recovered from"}
    ended.strikes(DRIVER, None, node=None).ends(-9)
    ended.started()
    assert judge(ended.goes_to(STEPS).ends().seen()).broken == []


@pytest.mark.parametrize(("nodes", "broken"), [((0,), []), ((1,), ["recovered"])])
def test_of_a_tier_that_was_told_of_twice_one_recovery_is_enough(nodes: tuple[int, ...], broken: list[str]):
    tale = Tale().goes_to(12).strikes(STORAGE, None, lasts_s=3)
    tale.tells("storage", "degrade_tier", ranks=[], name="s1")
    tale.tells("storage", "degrade_tier", ranks=[], nodes=nodes, name="s2")
    assert judge(tale.recovers("s1").goes_to(STEPS).ends().seen()).broken == broken


def test_a_flap_that_costs_nothing_may_pass():
    seen = Tale().goes_to(12).strikes(LINK, None).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == []
    assert (outcomes(seen)[0].kinds, outcomes(seen)[0].downtime_s) == ([], 0.0)


def test_what_need_not_be_told_may_be_told_by_what_is_done_about_it():
    """A short outage is waited for, whatever it is called; nothing else may be done."""
    patient = Expectation(actions=frozenset({"wait"}))

    def short(action: str) -> Observation:
        tale = Tale().goes_to(12).strikes(patient, None, lasts_s=2)
        name = tale.tells("collective_timeout", action)
        if action != "wait":
            tale.begins()
        return tale.recovers(name).goes_to(STEPS).ends().seen()

    assert judge(short("wait")).broken == []
    assert outcomes(short("wait"))[0].kinds == ["collective_timeout"]
    assert set(judge(short("restart_workers")).broken) == {"reported", "action"}


def test_a_checkpoint_that_was_damaged_may_be_refused():
    tale = Tale().goes_to(12).strikes(Expectation(rejected=True, lost_steps=None), None)
    tale.killed(1)
    tale.event("checkpoint_rejected", step=10, tier="durable", reason="c/0 has another checksum")
    assert judge(tale.goes_to(STEPS).ends().seen()).broken == []


def test_a_stall_that_was_waited_for_and_what_came_of_it_belong_to_the_same_outage():
    """Both have the same id in the ledger."""
    tale = Tale().goes_to(12).strikes(LINK, None, lasts_s=5)
    tale.tells("collective_timeout", "wait", name="g1-1")
    tale.t += 2
    tale.tells("node_lost", "restart_workers", name="g1-1")
    tale.begins()
    tale.recovers("g1-1", 2)
    seen = tale.goes_to(STEPS).ends().seen()
    (only,) = outcomes(seen)
    assert (only.kinds, only.taken, only.ok) == (["collective_timeout", "node_lost"], ["wait", "restart_workers"], True)


def test_a_stray_fault_of_a_kind_that_an_old_injection_expects_is_a_false_alarm():
    tale = Tale().goes_to(12).killed(1).goes_to(20)
    name = tale.tells("exit", "restart_workers", ranks=[1])
    tale.begins()
    seen = tale.recovers(name).goes_to(STEPS).ends().seen()
    assert judge(seen).broken == ["false alarms"]


def test_down_counts_from_the_injection_as_detected_does_however_late_the_failure_showed():
    tale = Tale().goes_to(12).strikes(KILLED)
    tale.t += 12.0
    name = tale.tells("exit", "restart_workers")
    tale.begins()
    seen = tale.recovers(name).goes_to(STEPS).ends().seen()  # which says that it took 1.5 s
    (only,) = outcomes(seen)
    assert (only.detection_s, only.downtime_s) == (pytest.approx(12.2), pytest.approx(13.2))


def test_down_does_not_count_the_time_in_which_steps_are_finished_after_an_injection():
    tale = Tale().goes_to(12).strikes(SPIKE, lasts_s=20).goes_to(17)
    one = tale.tells("loss_spike", "roll_back", step=10)
    tale.begins(resumed=10)
    two = tale.recovers(one).goes_to(14).tells("loss_spike", "roll_back", step=10)
    tale.begins(resumed=10)
    (only,) = outcomes(tale.recovers(two).goes_to(STEPS).ends().seen())
    assert only.downtime_s == pytest.approx(1.2 + 1.2)
