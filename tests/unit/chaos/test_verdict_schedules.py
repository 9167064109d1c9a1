"""Verdicts on campaigns that were struck at any steps."""

from dataclasses import replace

from campaign_tale import KILLED, STEPS, Tale
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos.verdict.verdict import judge

schedules = st.lists(st.tuples(st.integers(1, STEPS - 2), st.integers(0, 1), st.booleans()), min_size=1, max_size=8)


def told(schedule: list[tuple[int, int, bool]]) -> Tale:
    tale = Tale()
    raised = replace(KILLED, kinds=frozenset({"exception"}))
    for step, rank, by_hand in sorted(schedule):
        tale.goes_to(step)
        tale.killed(rank, *((KILLED, "exit") if by_hand else (raised, "exception")))
    return tale.goes_to(STEPS).ends()


@settings(max_examples=40, deadline=None)
@given(schedules)
def test_whatever_is_struck_when_a_recovered_campaign_is_green(schedule: list[tuple[int, int, bool]]):
    seen = told(schedule).seen()
    assert judge(seen).broken == []
    assert len(judge(seen).outcomes) == len(schedule)


@settings(max_examples=40, deadline=None)
@given(schedules, st.data())
def test_no_injection_can_be_left_out_of_the_record(schedule: list[tuple[int, int, bool]], data: st.DataObject):
    seen = told(schedule).seen()
    gone = data.draw(st.integers(0, len(schedule) - 1))
    kept = [each for number, each in enumerate(seen.injections) if number != gone]
    assert not judge(replace(seen, injections=kept)).ok


@settings(max_examples=40, deadline=None)
@given(schedules, st.data())
def test_no_loss_can_be_altered(schedule: list[tuple[int, int, bool]], data: st.DataObject):
    seen = told(schedule).seen()
    metrics = [dict(line) for line in seen.metrics]
    metrics[data.draw(st.integers(0, len(metrics) - 1))]["loss"] += 1e-12
    assert judge(replace(seen, metrics=metrics)).broken == ["losses"]
