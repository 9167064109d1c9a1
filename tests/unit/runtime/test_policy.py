"""The decision table, row by row."""

from dataclasses import replace

import pytest

from resilient.faults import Fault
from resilient.policy import TABLE, Budget, Situation, decide

BUDGET = Budget(max_restarts_per_hour=5, give_up_after_same_step=3)
FAULT = Fault("g1-1", "exit", "SIGKILL", (1,), (0,), 12, "SIGKILL", "", 0.0)
NOW = 10_000.0


def situation(fault: Fault = FAULT, earlier: list[tuple[float, Fault]] | None = None, draining: bool = False) -> Situation:
    return Situation(fault, earlier or [], BUDGET, draining, NOW)


def stalled(waited_s: float, *, kind: str = "collective_timeout", outage: str | None = "link ib0 of node 1 is down") -> Situation:
    fault = replace(FAULT, kind=kind, detect_s=waited_s)
    return replace(situation(fault), outage=outage, link_grace_s=60.0)


def replacing(fault: Fault, earlier: list[tuple[float, Fault]] | None = None) -> Situation:
    return replace(situation(fault, earlier), replace_stragglers=True)


other_steps = [(NOW - 10 * k, replace(FAULT, step=100 + k)) for k in range(5)]
same = [(NOW - 50, FAULT), (NOW - 20, FAULT)]
lost = replace(FAULT, kind="node_lost")
slow = replace(FAULT, kind="straggler", step=40)

ROWS = [
    (situation(draining=True), "finish_drain"),
    (situation(replace(FAULT, final=70)), "give_up"),
    (situation(earlier=same, draining=True), "finish_drain"),
    (situation(earlier=same), "give_up"),
    (situation(earlier=same[:1]), "restart_workers"),
    (situation(replace(FAULT, step=13), same), "restart_workers"),
    (situation(replace(FAULT, cause="SIGSEGV"), same), "restart_workers"),
    (situation(earlier=other_steps), "give_up"),
    (situation(earlier=[(NOW - 3601, fault) for _, fault in other_steps]), "restart_workers"),
    (situation(lost), "replace_node"),
    (situation(lost, [(NOW - 50, lost), (NOW - 20, lost)]), "give_up"),
    (situation(replace(FAULT, kind="exception", cause="ValueError")), "restart_workers"),
    (situation(replace(FAULT, kind="collective_timeout")), "restart_workers"),
    (stalled(20.0), "wait"),
    (stalled(61.0), "restart_workers"),
    (stalled(20.0, outage=None), "restart_workers"),
    (stalled(20.0, kind="hang"), "restart_workers"),
    (replace(stalled(20.0), draining=True), "finish_drain"),
    (situation(slow), "report"),
    (replacing(slow), "replace_node"),
    (replacing(slow, [(NOW - 20, replace(slow, step=20))]), "report"),
    (replacing(slow, [(NOW - 20, replace(slow, nodes=(1,)))]), "replace_node"),
    (replacing(slow, other_steps[:3]), "replace_node"),
    (replacing(slow, other_steps[:4]), "report"),
]


@pytest.mark.parametrize(("given", "action"), ROWS)
def test_the_first_row_that_applies_decides(given, action):
    assert decide(given).name == action


def test_every_row_is_reached_by_a_sample():
    hit = {next(i for i, row in enumerate(TABLE) if row.applies(given)) for given, _ in ROWS}
    assert hit == set(range(len(TABLE)))


def test_the_reason_to_give_up_names_failure_step_and_count():
    reason = decide(situation(earlier=same)).reason
    assert "SIGKILL" in reason
    assert "step 12" in reason
    assert "third" in reason
