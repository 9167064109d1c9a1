"""Events of every step become a line a minute, and what an incident needs of them stays."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilient import entries, summaries
from resilient.account import account
from resilient.ledger import event_entry
from resilient.report.past import Fold
from resilient.report.past import Snapshot as Told
from resilient.sinks.totals import Totals
from resilient.summaries import EVERY_S, NEWEST, ONE_BY_ONE, Summaries

Entries = list[dict[str, Any]]


def event(t: float, kind_of: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return event_entry(kind_of, fields, generation=generation, t=t, host="n1")


def snapshot(t: float, step: int, stall_s: float = 0.01) -> dict[str, Any]:
    return event(t, "snapshot", step=step, tier="ram", bytes=100, stall_s=stall_s, write_s=0.5)


def replica(t: float, step: int) -> dict[str, Any]:
    return event(t, "replicated", step=step, tier="ram")


def started(t: float, generation: int = 1) -> dict[str, Any]:
    return event(t, "generation_started", generation, nodes=["n1"], world_size=4, resumed_step=None)


def finished(t: float) -> dict[str, Any]:
    return event(t, "run_finished", exit_code=0, step=1)


def written(given: Iterable[dict[str, Any]]) -> Entries:
    between = Summaries()
    return [line for entry in given for line in between.take(entry)]


def single(line: dict[str, Any]) -> bool:
    return "count" not in line


def steps(count: int, every_s: float = 0.5) -> Entries:
    return [line for n in range(1, count + 1) for line in (snapshot(n * every_s, n), replica(n * every_s + 0.1, n))]


def test_a_short_generation_has_a_line_for_each_at_once():
    given = [started(0.0), *steps(ONE_BY_ONE // 2)]
    assert written(given) == given


def test_of_a_long_one_there_is_a_line_a_minute_for_each_event_of_a_tier():
    lines = written([started(0.0), *steps(10_000)])
    sums = [line for line in lines if not single(line)]
    minutes = (10_000 - ONE_BY_ONE // 2) * 0.5 / EVERY_S
    assert 2 * (minutes - 2) <= len(sums) <= 2 * (minutes + 1)
    assert len(lines) - len(sums) <= ONE_BY_ONE + 1
    first, second = (line for line in sums[:3] if line["event"] == "snapshot")
    assert first["first_step"] == ONE_BY_ONE // 2 + 1
    assert second["first_step"] == first["step"] + 1
    assert first["count"] == first["step"] - first["first_step"] + 1
    assert first["stall_s"] == pytest.approx(0.01 * first["count"])
    assert (first["bytes"], first["longest_stall_s"], first["tier"]) == (100 * first["count"], 0.01, "ram")
    assert all(entries.is_event(line) for line in lines)


def test_the_newest_before_a_fault_have_lines_of_their_own_and_the_next_generation_begins_anew():
    fault = event(6001.0, "fault", fault_id="f1", kind="exit", ranks=[1], nodes=[0], step=1, detail="", evidence="", detect_s=0)
    given = steps(10_000)
    lines = written([started(0.0), *given, fault, started(6002.0, 2), *steps(20)])
    before = lines[: lines.index(fault)]
    assert before[-NEWEST:] == given[-NEWEST:]
    assert not single(before[-NEWEST - 1])
    assert lines[lines.index(fault) + 2 :] == steps(20)


def test_snapshots_that_are_rare_are_not_summed_up():
    given = [snapshot(n * (EVERY_S + 1), n) for n in range(1, ONE_BY_ONE + 100)]
    assert written([started(0.0), *given, finished(1e6)])[1:-1] == given


KINDS = ["step"] * 60 + ["fault", "started"]
some_events = st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.01, 20), st.floats(0, 0.2), st.booleans()), max_size=200)
NOBODY: dict[str, Any] = {"ranks": [], "nodes": [], "step": None, "detail": "", "evidence": "", "detect_s": 0.0}


def told(drawn: list[tuple[str, float, float, bool]], repeated: int) -> Entries:
    found, t, generation = [started(0.0)], 0.0, 1
    for number, (kind, after_s, stall_s, replicated) in enumerate(drawn):
        if kind == "step":
            for _ in range(repeated):
                t += after_s
                found.append(snapshot(t, len(found), stall_s))
                found += [replica(t, len(found))] if replicated else []
            continue
        t += after_s
        generation += kind == "started"
        fault = event(t, "fault", generation, fault_id=f"f{number}", kind="exit", **NOBODY)
        found.append(started(t, generation) if kind == "started" else fault)
    return [*found, finished(t)]


@given(some_events)
@example([("step", 1.0, 0.0, False), ("step", 1.0, 0.0, False), ("step", 8.0, 0.0, False), ("fault", 1.0, 0.0, False)])
def test_nothing_is_lost_and_lines_are_in_order(drawn: list[tuple[str, float, float, bool]]):
    given = told(drawn, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summaries, "ONE_BY_ONE", 50)
        lines = written(given)
    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)
    assert all(entries.is_event(line) for line in lines)
    other = [line for line in given if line["event"] not in ("snapshot", "replicated")]
    assert [line for line in lines if line["event"] not in ("snapshot", "replicated")] == other
    for name in ("snapshot", "replicated"):
        mine, theirs = ([line for line in each if line["event"] == name] for each in (lines, given))
        assert sum(line.get("count", 1) for line in mine) == len(theirs)
        assert {line["step"] for line in mine} <= {line["step"] for line in theirs}
    stall_s = (sum(line["stall_s"] for line in each if line["event"] == "snapshot") for each in (lines, given))
    assert next(stall_s) == pytest.approx(next(stall_s), abs=1e-3)
    for at, line in enumerate(lines):
        if line["event"] == "fault":
            asked = given[max(0, given.index(line) - NEWEST) : given.index(line)]
            asked = [each for each in asked if each["t"] > asked[-1]["t"] - EVERY_S]
            assert lines[at - len(asked) : at] == asked


@pytest.mark.parametrize("stall_s", [0.0, 0.02, 0.3])
def test_the_account_the_metrics_and_the_report_come_to_the_same(stall_s: float):
    events = [event(0.0, "run_started", name="x", target_step=3000), started(1.0)]
    events += [snapshot(2.0 + n + min(stall_s, 0.05), n, stall_s) for n in range(1, 3000)]
    events.append(finished(3003.0))
    metrics = [{"t": 2.0 + n, "generation": 1, "step": n, "step_s": 0.9, "data_s": 0.1} for n in range(1, 3001)]
    lines = written(events)
    assert len(lines) < len(events) / 2
    (whole, summed) = (account(each, metrics).seconds for each in (events, lines))
    assert summed == pytest.approx(whole, abs=0.5)
    assert sum(summed.values()) == pytest.approx(sum(whole.values()))
    assert (whole["snapshot"] > 0) == (stall_s > 0)

    totals = [Totals(), Totals()]
    for each, found in zip(totals, (events, lines), strict=True):
        for line in found:
            each.take(line)
    assert totals[0].snapshots == totals[1].snapshots and totals[0].stall_s == pytest.approx(totals[1].stall_s)

    folds = [Fold(), Fold()]
    for fold, found in zip(folds, (events, lines), strict=True):
        fold.snapshots([Told(**{k: v for k, v in line.items() if k in Told.__struct_fields__}) for line in found if "tier" in line])
    one, other = (fold.past.tiers["ram"] for fold in folds)
    for name in ("snapshots", "size_bytes", "last_step", "longest_stall_s"):
        assert getattr(one, name) == getattr(other, name)
    assert one.stall_s == pytest.approx(other.stall_s)
