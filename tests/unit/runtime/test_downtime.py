"""The time of an incident is counted once, however many faults met in it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.account import account
from resilient.downtime import downtime
from resilient.past.fold import past_of
from resilient.status import summarize


def line(t: float, what: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": what, "generation": 1, "host": "n0", **fields}


def fault(t: float, name: str, incident: str | None, detect_s: float = 0.0) -> dict[str, Any]:
    ids = {"fault_id": name, **({"incident_id": incident} if incident else {})}
    return line(t, "fault", **ids, kind="node_lost", ranks=[1], nodes=[1], step=3, detail="", evidence="", detect_s=detect_s)


def recovered(t: float, name: str, down_s: float, incident: str | None = None, lost: int = 0) -> dict[str, Any]:
    ids = {"fault_id": name, **({"incident_id": incident} if incident else {})}
    return line(t, "recovered", **ids, step=4, downtime_s=down_s, lost_steps=lost)


def started(t: float = 0.0) -> dict[str, Any]:
    return line(t, "run_started", name="x", target_step=None)


# A node falls silent at 10 s: its ranks are waited for, then it is given up, and the next step ends at 59 s.
OF_ONE_EVENT = [
    started(),
    fault(20.0, "g1-1", "g1-1", detect_s=10.0),
    line(20.0, "action", fault_id="g1-1", incident_id="g1-1", name="wait", reason=""),
    fault(40.0, "g1-2", "g1-1", detect_s=30.0),
    line(40.0, "action", fault_id="g1-2", incident_id="g1-1", name="replace_node", reason=""),
    recovered(59.0, "g1-2", 19.0, "g1-1", lost=2),
    recovered(59.0, "g1-1", 49.0, "g1-1", lost=2),
]


def test_two_faults_of_one_event_cost_what_passed():
    found = downtime(OF_ONE_EVENT)
    assert (found.down_s, found.lost_steps) == (49.0, 2)
    summary = summarize(past_of(OF_ONE_EVENT, []), locked=False, now=60.0)
    assert (summary.faults, summary.recovered, summary.downtime_s, summary.lost_steps) == (2, 2, 49.0, 2)


def test_the_first_fault_of_an_incident_has_all_its_costs():
    steps = [{"t": t, "step": n, "step_s": 1.0, "generation": 1 + (n > 2)} for t, n in ((9.0, 1), (10.0, 2), (59.0, 3))]
    first, second = account(OF_ONE_EVENT, steps).incidents
    assert (first.incident_id, second.incident_id) == ("g1-1", "g1-1")
    assert sum(first.seconds.values()) == pytest.approx(48.0) and not second.seconds


def test_incidents_that_follow_each_other_are_added_up():
    found = downtime([started(), recovered(10.0, "a", 4.0, "a", lost=1), recovered(30.0, "b", 5.0, "b", lost=3)])
    assert (found.down_s, found.lost_steps) == (9.0, 4)


def test_an_id_of_a_job_before_is_another_incident():
    found = downtime([started(), recovered(10.0, "g4-1", 4.0, "g4-1"), started(20.0), recovered(30.0, "g4-1", 3.0, "g4-1")])
    assert found.down_s == 7.0


def test_what_stands_still_for_nothing_does_not_part_an_incident():
    lines = [started(), recovered(10.0, "a", 4.0, "a"), recovered(10.0, "s1", 0.0, "s1"), recovered(10.0, "b", 3.0, "a")]
    assert downtime(lines).down_s == 4.0


def test_faults_without_an_incident_overlap_in_no_second():
    assert downtime([started(), recovered(10.0, "a", 4.0), recovered(12.0, "b", 9.0)]).down_s == 6.0


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0, 30), st.sampled_from("abc"), st.booleans()), max_size=30))
def test_downtimes_never_sum_to_more_than_the_time_that_passed(happened: list[tuple[float, float, str, bool]]):
    t, lines = 100.0, [started(100.0)]
    for pause_s, down_s, incident, again in happened:
        t += pause_s
        lines.append(started(t) if again else recovered(t, incident, down_s, incident))
    found = downtime(lines)
    assert 0.0 <= found.down_s <= t - 100.0 + 1e-6
    assert found.down_s <= sum(each.get("downtime_s", 0.0) for each in lines) + 1e-6
