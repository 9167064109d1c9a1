"""The decision table, row by row."""

from dataclasses import replace

import pytest

from resilient.recovery.faults import Fault
from resilient.recovery.history import History
from resilient.recovery.policy import ILL, TABLE, UNFIT, Budget, Situation, decide, pause_s
from resilient.recovery.rollback import RollBack

BUDGET = Budget(max_restarts_per_hour=7, give_up_after_same_step=3)
FAULT = Fault("g1-1", "exit", "SIGKILL", (1,), (0,), 12, "SIGKILL", "", 0.0)
NOW = 10_000.0


def situation(fault: Fault = FAULT, earlier: list[tuple[float, Fault]] | None = None, draining: bool = False) -> Situation:
    return Situation(fault, History(earlier or []), BUDGET, draining, NOW)


def stalled(waited_s: float, *, kind: str = "collective_timeout", outage: str | None = "link ib0 of node 1 is down") -> Situation:
    fault = replace(FAULT, kind=kind, detect_s=waited_s)
    return replace(situation(fault), outage=outage, link_grace_s=60.0)


def ways(*causes: str) -> list[tuple[float, Fault]]:
    """Failures at the same step that differ."""
    return [(NOW - 60 + k, replace(FAULT, cause=cause, detail=cause, ranks=(k,))) for k, cause in enumerate(causes)]


def replacing(fault: Fault, earlier: list[tuple[float, Fault]] | None = None) -> Situation:
    return replace(situation(fault, earlier), replace_stragglers=True)


other_steps = [(NOW - 10 * k, replace(FAULT, step=2 + k)) for k in range(7)]
same = [(NOW - 50, FAULT), (NOW - 20, FAULT)]
lost = replace(FAULT, kind="node_lost")
slow = replace(FAULT, kind="straggler", step=40)

bad = replace(FAULT, fault_id="g3-3", kind="not_finite", cause="BadBatch", step=16, since=13, detail="loss nan")


def spoilt(times: int, *checkpoints: int, fault: Fault = bad) -> Situation:
    """The numbers are bad, and have been as often before, each time after a roll-back."""
    before = [replace(bad, fault_id=f"g3-{k}") for k in range(times)]
    given = situation(fault, [(NOW - 9, each) for each in before])
    return replace(given, roll_backs=[(each, RollBack(12 - k)) for k, each in enumerate(before)], checkpoints=checkpoints)


away = replace(FAULT, kind="exception", cause="MissingError", step=None, files="/data/corpus.idx")


def absent(times: int, seconds: float, *, fault: Fault = away) -> Situation:
    """Files are away, and have been for so long, in which so many generations have found that."""
    times_s = [NOW - seconds * (times - k) / times for k in range(times)] if times else []
    return situation(fault, [(NOW - seconds - 1, FAULT), *((t, away) for t in times_s)])


together = [(NOW - 9, replace(lost, cause=f"node {node}", nodes=(node,), generation=5)) for node in range(7)]


def flapping(times: int, *, dispensable: bool = True, others: tuple[int, ...] = (), since_s: float = 1000.0) -> Situation:
    """A node is lost, and was as often before, each time at another step; the others of the first times were lost with it."""
    steps = range(times)
    earlier = [(NOW - since_s + k, replace(lost, cause="node 0", step=20 + k, generation=20 + k)) for k in steps]
    earlier += [(NOW - since_s + k, replace(lost, cause="node 1", nodes=(1,), step=20 + k, generation=20 + k)) for k in others]
    fault = replace(lost, cause="node 0", step=99, generation=99)
    return replace(situation(fault, sorted(earlier, key=lambda each: each[0])), dispensable=dispensable)


def after_losses(left: frozenset[int]) -> Situation:
    """A rank of node 1 fails after node 0 was lost seven times. Args: left: nodes without which the others go on."""
    fault = replace(FAULT, nodes=(1,), step=99, generation=99)
    return replace(flapping(7), fault=fault, left=left)


ROWS = [
    (situation(replace(lost, cause="node 7", generation=5), together), "replace_node"),
    (situation(replace(lost, cause="node 7", generation=5), [*ways("a", "b", "c", "d"), *together]), "replace_node"),
    (situation(replace(lost, cause="node 7", generation=6), [*ways("a", "b", "c", "d"), *together]), "give_up"),
    (situation(replace(lost, cause="node 0", generation=5), together), "replace_node"),
    (absent(0, 0.0), "restart_workers"),
    (absent(20, 299.0), "restart_workers"),
    (absent(20, 301.0), "give_up"),
    (absent(20, 299.0, fault=replace(FAULT, step=None)), "restart_workers"),
    (replace(absent(2, 9.0), budget=replace(BUDGET, files_patience_s=0.0)), "give_up"),
    (replace(absent(20, 299.0), draining=True), "finish_drain"),
    (absent(20, 299.0, fault=replace(away, final=78)), "give_up"),
    (situation(replace(FAULT, kind="storage", cause="run directory", ranks=()), draining=True), "degrade"),
    (situation(replace(lost, cause=UNFIT), draining=True), "exclude_node"),
    (situation(replace(lost, cause=ILL)), "exclude_node"),
    (situation(replace(lost, ranks=()), draining=True), "restart_agent"),
    (situation(draining=True), "finish_drain"),
    (situation(replace(FAULT, final=70)), "give_up"),
    (situation(earlier=same, draining=True), "finish_drain"),
    (situation(earlier=same), "give_up"),
    (situation(earlier=same[:1]), "restart_workers"),
    (situation(replace(FAULT, step=13), same), "restart_workers"),
    (situation(replace(FAULT, cause="SIGSEGV"), same), "restart_workers"),
    (situation(earlier=ways("a", "b", "c", "d")), "restart_workers"),
    (situation(earlier=ways("a", "b", "c", "d", "e")), "give_up"),
    (situation(earlier=[*ways("a", "b", "c", "d", "e")[:-1], (NOW - 1, replace(FAULT, cause="e", step=13))]), "restart_workers"),
    (situation(earlier=[*same, (NOW - 1, replace(FAULT, step=13))]), "restart_workers"),
    (situation(replace(FAULT, step=None), [(NOW - 9, replace(FAULT, step=None))] * 2), "give_up"),
    (situation(earlier=other_steps), "give_up"),
    (situation(earlier=[(NOW - 3601, fault) for _, fault in other_steps]), "restart_workers"),
    (flapping(2), "replace_node"),
    (flapping(7), "replace_node"),
    (flapping(7, dispensable=False), "give_up"),
    (flapping(7, others=(0, 1, 2, 3, 4, 5)), "give_up"),
    (
        replace(
            situation(replace(lost, generation=3), [(NOW - 20, replace(lost, generation=k)) for k in (1, 2)]), dispensable=True
        ),
        "replace_node",
    ),
    (flapping(7, since_s=3590.0), "replace_node"),
    (after_losses(frozenset()), "give_up"),
    (after_losses(frozenset({1})), "give_up"),
    (after_losses(frozenset({0, 1})), "restart_workers"),
    (situation(lost), "replace_node"),
    (situation(lost, [(NOW - 50, lost), (NOW - 20, lost)]), "give_up"),
    (situation(replace(FAULT, kind="exception", cause="ValueError")), "restart_workers"),
    (situation(replace(FAULT, kind="collective_timeout")), "restart_workers"),
    (spoilt(0, 10, 12, 15), "roll_back"),
    (spoilt(0, 10, fault=replace(bad, kind="loss_spike")), "roll_back"),
    (spoilt(2, 5, 10), "roll_back"),
    (spoilt(3, 5, 10), "give_up"),
    (spoilt(3, 5, 10, fault=replace(bad, step=17)), "roll_back"),
    (spoilt(0, 15), "give_up"),
    (replace(spoilt(0, 15), beginning=True), "roll_back"),
    (replace(spoilt(0, 10), draining=True), "finish_drain"),
    (situation(bad, other_steps), "give_up"),
    (stalled(20.0), "wait"),
    (stalled(20.0, kind="link_down"), "wait"),
    (stalled(61.0), "restart_workers"),
    (stalled(20.0, outage=None), "restart_workers"),
    (stalled(20.0, kind="hang"), "restart_workers"),
    (replace(stalled(20.0), draining=True), "finish_drain"),
    (situation(slow), "report"),
    (replacing(slow), "replace_node"),
    (replacing(slow, [(NOW - 20, replace(slow, step=20))]), "report"),
    (replacing(slow, [(NOW - 20, replace(slow, nodes=(1,)))]), "replace_node"),
    (replacing(slow, other_steps[:5]), "replace_node"),
    (replacing(slow, other_steps[:6]), "report"),
]


@pytest.mark.parametrize(("given", "action"), ROWS)
def test_the_first_row_that_applies_decides(given, action):
    assert decide(given).name == action


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (flapping(1), False),
        (flapping(2), False),
        (flapping(3), True),  # half of the restarts of an hour
        (flapping(3, dispensable=False), False),
        (flapping(3, since_s=3601.0), False),
        (flapping(3, others=(0,)), False),
        (flapping(5, others=(0, 1)), True),
        (replace(flapping(2), budget=replace(BUDGET, max_restarts_per_hour=2)), True),
        (replace(flapping(1), budget=replace(BUDGET, max_restarts_per_hour=1)), False),
        (replace(flapping(3), fault=replace(lost, nodes=(1,), generation=99, step=99)), False),
        (replace(flapping(3), fault=replace(FAULT, generation=99, step=99)), False),
    ],
)
def test_a_node_that_uses_half_of_the_restarts_up_by_itself_is_left_where_the_others_can_do_without_it(given, left):
    action = decide(given)
    assert bool(action.leave) is left
    assert ("times within an hour: it is left" in action.reason) is left


def test_every_row_is_reached_by_a_sample():
    hit = {next(i for i, row in enumerate(TABLE) if row.applies(given)) for given, _ in ROWS}
    assert hit == set(range(len(TABLE)))


def test_the_reason_to_wait_for_files_names_them_and_the_patience():
    reason = decide(absent(3, 9.0)).reason
    assert "/data/corpus.idx is missing or unreadable" in reason and "up to 300 s" in reason


def test_files_are_looked_for_a_last_time_when_the_patience_is_over():
    assert decide(absent(20, 290.0)).delay_s == pytest.approx(10.0)
    assert decide(absent(20, 100.0)).delay_s == 30.0


def test_files_that_were_there_in_between_are_waited_for_anew():
    progress = replace(away, step=14)
    given = situation(replace(away, step=14), [(NOW - 1000, replace(away, step=13)), (NOW - 10, progress)])
    assert given.files_waited_s == 10.0 and decide(given).name == "restart_workers"


def test_the_reason_to_give_up_names_failure_step_and_count():
    reason = decide(situation(earlier=same)).reason
    assert "SIGKILL" in reason
    assert "step 12" in reason
    assert "third" in reason


def test_the_reason_to_give_up_at_a_step_that_fails_in_many_ways_names_them_all():
    reason = decide(situation(earlier=ways("ValueError: x", "SIGSEGV", "ValueError: x", "SIGBUS", "SIGSEGV"))).reason
    assert "6 attempts ended at step 12" in reason
    assert "ValueError: x (rank 0, 2), 2 times" in reason
    assert "SIGSEGV (rank 1, 4), 2 times" in reason
    assert "SIGBUS (rank 3)" in reason
    assert "SIGKILL (rank 1)" in reason


def at(*steps: int | None) -> list[Fault]:
    return [replace(FAULT, step=step) for step in steps]


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ((12,), (12,)),
        ((12, 12), (12, 12)),
        ((12, 13), (13,)),
        ((12, 11, 12), (12, 11, 12)),
        ((12, None, 12), (12, None, 12)),
        ((None, None, 1), (1,)),
        ((12, 12, 40, 38), (40, 38)),
    ],
)
def test_a_step_that_had_failed_and_was_finished_forgets_the_failures_before(steps, left):
    *earlier, last = at(*steps)
    found = situation(last, [(NOW, each) for each in earlier]).stretch
    assert [fault.step for fault in found] == list(left)


def test_pauses_double_up_to_the_longest():
    assert [pause_s(failures, 30.0) for failures in range(1, 10)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert pause_s(10_000, 30.0) == 30.0


@pytest.mark.parametrize(
    ("given", "delay_s"),
    [
        (situation(), 0.0),
        (situation(earlier=same[:1]), 0.5),
        (situation(lost, same[:1]), 0.5),
        (situation(replace(FAULT, cause="SIGSEGV"), same), 1.0),
        (situation(replace(FAULT, step=13), same), 0.0),
        (situation(earlier=same), 0.0),  # it is the end
    ],
)
def test_a_restart_without_progress_is_held_back_and_says_so(given, delay_s):
    action = decide(given)
    assert action.delay_s == delay_s
    assert (f"in {delay_s:g} s" in action.reason) is (delay_s > 0)


def test_a_roll_back_says_where_to_and_since_when_and_what_is_left_out():
    action = decide(spoilt(0, 10, 12, 15))
    assert action.roll_back == RollBack(12)
    assert action.delay_s == 0.0
    assert "bad since step 13" in action.reason
    assert "back to step 12" in action.reason
    action = decide(spoilt(1, 10, 12, 15))
    assert action.roll_back == RollBack(10)
    assert action.delay_s == 0.5
    action = decide(spoilt(2, 5, 10, 12, 15))
    assert action.roll_back == RollBack(10, (13, 16))
    assert action.delay_s == 1.0
    assert "steps 13 to 16 are left out" in action.reason


def test_giving_up_after_roll_backs_names_where_they_led():
    reason = decide(spoilt(3, 5, 10)).reason
    assert "bad since step 13" in reason
    assert "step 12, step 11, step 10" in reason


def test_giving_up_without_a_checkpoint_from_before_says_so():
    assert "the oldest is of step 15" in decide(spoilt(0, 15, 16)).reason
