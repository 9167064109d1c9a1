"""The page and the tables of a verdict: whole, safe to read, and without anything from outside."""

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from broken_campaigns import BREAKS
from browser import Browser, looks_right
from campaign_tale import KILLED, STEPS, Tale, usual
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from chaos.injectors.context import Target
from chaos.verdict import page, report
from chaos.verdict.record import Injection
from chaos.verdict.verdict import Outcome, judge
from resilient.account import account
from resilient.drawing.chart import POINTS, thinned, ticks


def drawn(text: str) -> ET.Element:
    """The page as a reader parses it; void elements are closed, so that a strict parser can."""
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>"))


def classes(root: ET.Element) -> list[str]:
    svg = next(element for element in root.iter("svg") if element.get("role") == "img")
    return [element.get("class", "") for element in svg.iter()]


def test_the_page_shows_every_injection_action_recovery_and_generation(tmp_path: Path):
    seen = usual()
    root = drawn(page.save(seen, judge(seen), tmp_path).read_text())
    marks = classes(root)
    assert [marks.count(kind) for kind in ("injection", "action", "recovered", "curve")] == [2, 2, 2, 6]
    assert marks.count("band0") + marks.count("band1") == 3
    titles = [title.text or "" for title in root.iter("title")]
    assert any("f1: worker_kill at 14." in title for title in titles)
    assert any("recovered at step 11" in title for title in titles)


def test_the_page_is_read_in_any_window_without_an_error(browser: Browser, tmp_path: Path):
    seen = BREAKS["another rank was blamed"][1](usual())
    looks_right(browser, page.save(seen, judge(seen), tmp_path))


def test_the_page_names_what_is_broken():
    seen = BREAKS["another rank was blamed"][1](usual())
    text = page.page(seen, judge(seen))
    assert "Broken: culprit" in text
    assert "exit blames rank 0, and it was rank 1" in text
    assert "Broken:" not in page.page(usual(), judge(usual()))


def test_nothing_on_the_page_comes_from_outside_and_nothing_in_it_is_taken_for_markup():
    seen = replace(usual(), experiment="<script>alert(1)</script>&")
    seen = replace(seen, events=[{**line, "reason": '"><img src=x>'} for line in seen.events])
    root = drawn(page.page(seen, judge(seen)))
    assert not {"script", "img", "link", "iframe"} & {element.tag for element in root.iter()}
    assert all(not {"src", "href"} & set(element.attrib) for element in root.iter())
    assert "url(" not in page.page(seen, judge(seen))


def test_a_campaign_that_never_computed_a_step_has_a_page():
    tale = Tale()
    tale.ends(70)
    seen = replace(
        tale.seen(),
        injections=[Injection("f1", "worker_kill", {}, Target(rank=0), 1000.0, failed="rank 0 does not run here")],
        expected={"f1": KILLED},
        account=account([], []),
    )
    assert "No step was computed." in page.page(seen, judge(seen))
    drawn(page.page(seen, judge(seen)))


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), None])
def test_a_loss_that_is_no_number_leaves_a_gap(loss: float | None):
    seen = usual()
    seen = replace(seen, metrics=[{**line, "loss": loss} for line in seen.metrics])
    drawn(page.page(seen, judge(seen)))


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5 * POINTS))
def test_a_long_curve_keeps_its_extremes(values: list[float]):
    points = list(enumerate(map(float, values)))
    kept = thinned([(float(t), value) for t, value in points], POINTS)
    assert len(kept) <= POINTS
    assert {min(values), max(values)} <= {value for _, value in kept}
    assert [t for t, _ in kept] == sorted(t for t, _ in kept)


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_an_axis_has_a_few_round_numbers_within_its_range(low: float, span: float):
    found = ticks(low, low + span, 4)
    assert 1 <= len(found) <= 9
    assert all(low - span * 1e-3 - abs(low) * 1e-9 <= tick <= low + span * (1 + 1e-3) + abs(low) * 1e-9 for tick in found)


def test_the_json_is_stable(tmp_path: Path):
    told = json.loads(report.save(judge(usual()), tmp_path).read_text())
    assert list(told) == [
        "version", "experiment", "seed", "ok", "broken", "faults", "kinds", "steps", "generations", "wall_s", "goodput",
        "downtime_s", "lost_steps", "checks", "injections", "left_out",
    ]  # fmt: skip
    assert (told["ok"], told["faults"], told["steps"], told["downtime_s"], told["lost_steps"]) == (True, 2, STEPS, 3.0, 5)
    assert list(told["injections"][0]) == [
        "id", "fault", "target", "t", "recovered", "faults", "kinds", "detection_s", "downtime_s", "lost_steps", "culprit",
        "taken", "expected", "covered_by", "wrong", "ok",
    ]  # fmt: skip
    assert list(told["checks"][0]) == ["name", "ok", "detail"]


def test_the_terminal_shows_each_injection_and_what_is_wrong():
    def shown(name: str | None) -> str:
        out = io.StringIO()
        seen = usual() if name is None else BREAKS[name][1](usual())
        report.show(judge(seen), Console(file=out, width=200))
        return out.getvalue()

    assert "17 of 17 invariants hold" in shown(None)
    assert shown(None).count("worker_kill") == 2
    assert "culprit: f1 (worker_kill): exit blames rank 0, and it was rank 1" in shown("another rank was blamed")
    assert "NOT AS IT SHOULD BE" in shown("another rank was blamed")


def outcomes() -> list[Outcome]:
    rank, node = Target(rank=3), Target(node=1, host="n1")
    return [
        Outcome("f1", "coordinator_unreachable", node, 1.0, True, ("a",), ("collective_timeout", "node_lost"), 1.5, 12.25, 3,
                "not asked", ("restart_workers", "replace_node"), ("restart_workers",)),
        Outcome("f2", "worker_kill", rank, 2.0, True, ("b",), ("exit",), 0.02, 0.85, 1, "right", ("restart_workers",)),
        Outcome("f3", "hang_data", rank, 3.0, True, (), (), None, None, None, "wrong", (),
                wrong={"false alarms": "x", "reported": "y"}),
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 90, 100, 120, 200])
def test_the_table_of_a_verdict_breaks_no_word_however_narrow_the_terminal(width: int):
    out = io.StringIO()
    report.show(replace(judge(usual()), outcomes=outcomes()), Console(file=out, width=width))
    table, _, _ = out.getvalue().partition("losses:")
    shown = {word for line in table.splitlines() for word in line.split()}
    whole = "fault target reported as culprit action detected down lost rank 3 n1 exit not asked right 12 s ok"
    assert set(whole.split()) <= shown
    for name in ("coordinator_unreachable", "worker_kill", "collective_timeout,"):
        assert name in shown or set(name.replace("_", "_ ").split()) <= shown
    assert {"restart", "workers,", "workers"} <= shown and " 0.85 s " in table
    assert all(len(line) <= width for line in table.splitlines())
    if width == 200:
        assert len(table.splitlines()) == 4
