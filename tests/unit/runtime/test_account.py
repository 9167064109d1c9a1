"""Every second has a name, and the names sum to the whole."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.account import PARTS, Accounting, account, in_order


def event(t: float, what: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": what, "generation": generation, **fields}


def step(t: float, number: int, step_s: float = 1.0, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"t": t, "step": number, "step_s": step_s, "generation": generation, **fields}


def started(t: float, generation: int = 1, world: int = 2, resumed: int | None = 0) -> dict[str, Any]:
    return event(t, "generation_started", generation, world_size=world, resumed_step=resumed)


def fault(t: float, detect_s: float, number: int = 1, kind: str = "exit", generation: int = 1) -> dict[str, Any]:
    where = {"ranks": [1], "nodes": [0], "step": 3}
    return event(t, "fault", generation, fault_id=f"f{number}", kind=kind, detail="SIGKILL", detect_s=detect_s, **where)


def action(t: float, name: str, number: int = 1) -> dict[str, Any]:
    return event(t, "action", fault_id=f"f{number}", name=name, reason="")


def restarted(t: float, again: dict[str, Any], recovered: dict[str, Any], end_t: float) -> list[dict[str, Any]]:
    """A job that has a fault, 0.3 s before it is noticed, restarts its workers and comes to its end."""
    begun = [event(0.0, "run_started"), started(0.0), fault(t, 0.3), action(t, "restart_workers")]
    return [*begun, again, recovered, event(end_t, "run_finished", 2)]


def parts(events: list[dict[str, Any]], metrics: list[dict[str, Any]], **options: Any) -> dict[str, float]:
    found = account(events, metrics, **options)
    assert found.rank_s == pytest.approx(sum(found.seconds.values()))
    return {name: round(seconds, 6) for name, seconds in found.seconds.items() if seconds > 1e-9}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_part_is_can_be_understood_without_another_part(part: str):
    """Status sorts them by their share."""
    assert not set(PARTS[part].split()) & {"then", "these", "those", "before"}


def test_a_job_without_faults():
    events = [
        event(0.0, "run_started"),
        started(2.0),
        event(7.3, "snapshot", step=2, tier="ram", stall_s=0.25),
        event(7.4, "snapshot", step=2, tier="scratch", stall_s=0.25),
        event(9.0, "validation", step=3),
        event(12.0, "run_finished"),
    ]
    metrics = [step(5.0, 1, data_s=0.5), step(6.0, 2), step(7.5, 3), step(11.0, 4)]
    # 1 s of start, 2 s to the first step; gaps: 0, 0.5 (0.25 of it a snapshot), 2.5 of validation; 1 s to the end
    wall = {"start": 4.0, "data": 0.5, "productive": 3.5, "snapshot": 0.25, "idle": 0.25, "evaluation": 2.5, "finish": 1.0}
    assert parts(events, metrics) == {name: 2 * seconds for name, seconds in wall.items()}
    found = account(events, metrics)
    assert found.wall_s == 12.0 and found.goodput == pytest.approx(3.5 / 12)


def test_a_fault_its_recovery_and_what_is_computed_again():
    recovered = event(7.0, "recovered", 2, fault_id="f1", lost_steps=1, downtime_s=3.6, step=2)
    events = restarted(3.7, started(4.0, 2, resumed=1), recovered, 8.0)
    metrics = [step(2.0, 1), step(3.0, 2), step(6.5, 2, generation=2), step(7.5, 3, generation=2)]
    wall = {"start": 1.0, "productive": 3.0, "detection": 0.3, "restart": 0.3, "restore": 1.5, "rework": 1.4, "finish": 0.5}
    assert parts(events, metrics) == {name: pytest.approx(2 * seconds) for name, seconds in wall.items()}
    (incident,) = account(events, metrics).incidents
    assert (incident.action, incident.lost_steps, incident.ranks) == ("restart_workers", 1, [1])
    assert {name: round(seconds, 6) for name, seconds in incident.seconds.items() if seconds} == {
        **{"detection": 0.3, "restart": 0.3, "restore": 1.5, "rework": 1.0},
    }


def test_a_step_that_ends_after_its_generation_was_given_up_is_part_of_the_restart():
    recovered = event(7.0, "recovered", 2, fault_id="f1", lost_steps=0, downtime_s=3.6, step=3)
    events = restarted(3.7, started(4.5, 2, resumed=2), recovered, 7.5)
    metrics = [step(2.0, 1), step(3.0, 2), step(4.0, 3), step(7.0, 3, generation=2)]
    wall = {"start": 1.0, "productive": 3.0, "rework": 0.4, "detection": 0.3, "restart": 0.8, "restore": 1.5, "finish": 0.5}
    assert parts(events, metrics) == {name: pytest.approx(2 * seconds) for name, seconds in wall.items()}
    (incident,) = account(events, metrics).incidents
    assert incident.seconds["restart"] == pytest.approx(0.8)


def test_a_step_that_ends_before_its_generation_is_told_of_belongs_to_it():
    recovered = event(4.6, "recovered", 2, fault_id="f1", lost_steps=0, downtime_s=1.6, step=3)
    events = restarted(3.3, started(4.5, 2, resumed=2), recovered, 5.5)
    metrics = [step(2.0, 1), step(3.0, 2), step(4.4, 3, 0.4, generation=2), step(5.0, 4, 0.5, generation=2)]
    wall = {"start": 1.0, "productive": 2.9, "detection": 0.3, "restart": 0.7, "idle": 0.1, "finish": 0.5}
    assert parts(events, metrics) == {name: pytest.approx(2 * seconds) for name, seconds in wall.items()}


def test_a_node_that_is_lost_and_returns_is_counted_with_the_ranks_that_there_are():
    events = [
        event(0.0, "run_started"),
        started(0.0),
        fault(4.0, 0.5, kind="node_lost"),
        action(4.0, "replace_node"),
        action(6.0, "shrink"),
        started(6.0, 2, world=1, resumed=3),
        event(8.0, "recovered", fault_id="f1", step=4, downtime_s=4.0, lost_steps=0),
        event(8.5, "fault", fault_id="f2", kind="node_lost", detail="", detect_s=30.0, ranks=[], nodes=[2], step=4),
        action(8.5, "restart_agent", 2),  # a spare: nobody notices
        action(9.25, "grow"),
        started(9.5, 3, world=2, resumed=4),
        event(11.0, "run_finished"),
    ]
    metrics = [step(1.0, 1), step(2.0, 2), step(3.0, 3), step(8.0, 4, generation=2), step(9.0, 5, generation=2)]
    metrics += [step(11.0, 6, generation=3)]
    assert parts(events, metrics) == {
        "productive": 3 * 2 + 2 * 1 + 1 * 2,
        "rework": 0.5 * 2 + 0.25 * 1,  # steps that were cut off
        "detection": 0.5 * 2,
        "restart": 2.0 * 2 + 0.25 * 1,
        "restore": 1.0 * 1 + 0.5 * 2,
    }
    assert [incident.action for incident in account(events, metrics).incidents] == ["replace_node", "restart_agent"]


def test_a_stall_that_was_waited_for_is_the_links():
    events = [event(0.0, "run_started"), started(0.0), fault(15.0, 12.0, kind="collective_timeout"), action(15.0, "wait")]
    events += [event(20.0, "recovered", fault_id="f1", lost_steps=0, downtime_s=17.0, step=4), event(21.0, "run_finished")]
    metrics = [step(1.0, 1), step(2.0, 2), step(3.0, 3), step(20.0, 4, step_s=17.0), step(21.0, 5)]
    assert parts(events, metrics) == {"productive": 10.0, "link": 32.0}


def test_a_driver_that_was_killed_leaves_what_it_has_told_and_the_next_job_goes_on():
    events = [event(0.0, "run_started"), started(0.0), event(100.0, "run_started"), started(100.0, 2, resumed=1)]
    metrics = [step(1.0, 1), step(2.0, 2), step(104.0, 2, generation=2), step(105.0, 3, generation=2)]
    assert parts(events, metrics) == {"productive": 6.0, "restore": 6.0, "rework": 2.0}
    assert account(events, metrics, now=107.0).seconds["productive"] == 10.0
    assert account([], []).goodput is None


@pytest.mark.parametrize(
    ("resumed", "told_after", "computed"),
    [
        (3, 1, {"productive": 7.5}),
        (3, 2, {"productive": 7.5}),
        (1, 1, {"productive": 4.5, "rework": 3.0}),  # the later of two that computed a step did so again
        (1, 2, {"productive": 4.0, "rework": 3.5}),
    ],
)
def test_steps_of_a_killed_driver_that_nodes_tell_the_next_one_of_are_its_own_time(
    resumed: int, told_after: int, computed: dict[str, float]
):
    events = [
        event(0.0, "run_started"),
        started(2.0),
        event(6.0, "run_started"),
        event(8.0, "generation_started", 2, world_size=1, resumed_step=resumed),
        event(11.0, "run_finished", 2),
    ]
    late = [step(4.5, 2), step(5.75, 3, data_s=0.25), step(7.0, 4)]  # the last one by a clock that goes wrong
    steps = [step(9.5, resumed + 1, generation=2), step(10.5, resumed + 2, generation=2)]
    wall = {"start": 2 * 2.0 + 2.0, "idle": 2 * 0.75, "data": 2 * 0.25, "restore": 0.5, "finish": 0.5}
    metrics = [step(3.0, 1), *steps[:told_after], *late, *steps[told_after:]]
    assert parts(events, metrics) == {**wall, **computed}
    found = account(events, metrics)
    assert found.wall_s == 5.75 + 5.0
    assert [(run.until_t, run.step) for run in found.runs] == [(5.75, 3), (11.0, resumed + 2)]
    assert found.runs[0].seconds == {**found.runs[0].seconds, "start": 2.0, "idle": 0.75, "data": 0.25}


def test_a_tier_in_trouble_costs_no_time():
    events = [event(0.0, "run_started"), started(0.0), fault(1.5, 0.0, kind="storage"), event(2.0, "run_finished")]
    found = account(events, [step(1.0, 1), step(2.0, 2)])
    assert not found.incidents and found.goodput == 1.0
    assert found.kinds["storage"].faults == found.runs[0].faults == 1 and found.kinds["storage"].recovered == 0
    over = event(1.7, "recovered", fault_id="f1", lost_steps=0, downtime_s=0.0, step=1)
    assert account([*events[:3], over, events[3]], []).kinds["storage"].recovered == 1


def test_steps_that_were_lost_by_faults_that_met_are_counted_once():
    def recovered(number: int, lost_steps: int, incident: int) -> dict[str, Any]:
        about = {"lost_steps": lost_steps, "downtime_s": 1.0, "step": 2, "incident_id": f"f{incident}"}
        return event(6.0, "recovered", 2, fault_id=f"f{number}", **about)

    met = [fault(3.7, 0.3), action(3.7, "restart_workers"), fault(3.8, 0.3, 2, "hang"), action(3.8, "restart_workers", 2)]
    later = [fault(8.0, 0.3, 3, generation=2), action(8.0, "restart_workers", 3), recovered(3, 4, 3) | {"t": 9.0}]
    events = [event(0.0, "run_started"), started(0.0), *met, started(4.0, 2), recovered(1, 5, 1), recovered(2, 7, 1), *later]
    found = account(events, [])
    assert [each.lost_steps for each in found.incidents] == [5, 7, 4]
    assert found.runs[0].lost_steps == sum(kind.lost_steps for kind in found.kinds.values()) == 7 + 4


def test_faults_that_are_never_over_cost_no_more_each_however_many_there_are():
    events = [event(0.0, "run_started")]
    for number in range(1, 301):
        t = 10.0 * number
        events += [started(t, number), fault(t + 1, 0.1, number, generation=number), action(t + 1, "restart_workers", number)]
    events.append(event(3010.0, "recovered", 300, fault_id="f300", step=3, downtime_s=1.0, lost_steps=0))
    kept = Accounting(keep=20)
    for _, line in in_order(events, []):
        kept.event(line)
        assert len(kept.open) <= 20
    assert len(kept.open) == 19
    assert kept.closed(3020.0).seconds == pytest.approx(account(events, [], now=3020.0).seconds)


def test_a_step_that_a_lost_node_is_late_to_tell_of_is_not_the_last_one():
    events = [event(0.0, "run_started"), started(0.0), started(4.0, 2), event(8.0, "run_finished", 2)]
    metrics = [step(2.0, 1), step(6.0, 2, generation=2), step(7.0, 3, generation=2), step(3.9, 2)]
    found = account(events, metrics)
    assert found.runs[0].step == 3
    assert found.seconds == account(events, metrics[:3]).seconds


@pytest.mark.parametrize("name", ["report", "recompute_batch"])
def test_what_stops_no_rank_costs_no_time(name: str):
    events = [
        event(0.0, "run_started"),
        started(0.0),
        fault(1.5, 0.0, kind="straggler"),
        action(1.5, name),
        event(2.0, "run_finished"),
    ]
    found = account(events, [step(1.0, 1), step(2.0, 2)])
    assert found.incidents[0].action == name and not found.incidents[0].seconds
    assert found.goodput == 1.0


names = st.sampled_from(["step", "fault", "wait", "generation", "snapshot", "validation", "recovered", "started", "finished"])


@given(st.lists(st.tuples(names, st.floats(0, 5), st.floats(0, 9)), max_size=40), st.integers(1, 8))
def test_whatever_happens_the_parts_sum_to_the_time_of_all_ranks(happened: list[tuple[str, float, float]], world: int):
    events, metrics, t, generation = [event(0.0, "run_started"), started(0.0, world=world)], [], 0.0, 1
    ends = False
    for number, (name, pause_s, seconds) in enumerate(happened):
        t += pause_s
        if name == "step":
            metrics.append(step(t, number % 7, seconds, generation, data_s=seconds / 2))
        elif name in ("fault", "wait"):
            events += [fault(t, seconds, number, generation=generation)]
            events += [action(t, "wait" if name == "wait" else "restart_workers", number)]
        elif name == "generation":
            generation += 1
            events.append(started(t, generation, world, resumed=number % 2))
        elif name == "snapshot":
            events.append(event(t, "snapshot", generation, step=number % 7, tier="ram", stall_s=seconds))
        elif name == "validation":
            events.append(event(t, "validation", generation, step=number % 7))
        elif name == "recovered":
            events.append(event(t, "recovered", generation, fault_id=f"f{number - 1}", lost_steps=1))
        elif name == "finished" and number == len(happened) - 1:
            events.append(event(t, "run_finished", generation))
            ends = True
    found = account(events, metrics, now=None if ends else t)
    assert found.wall_s == pytest.approx(t)
    down_s = sum(sum(incident.seconds.values()) for incident in found.incidents)
    assert down_s <= (found.rank_s - found.seconds["productive"] - found.seconds["data"]) / world + 1e-6
    assert found.rank_s == pytest.approx(t * world)
    assert found.seconds.keys() == PARTS.keys() and min(found.seconds.values()) >= 0
