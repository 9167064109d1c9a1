"""The picture of a campaign: well-formed whatever the ledger holds, with every fault in it, and small."""

import itertools
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient import ledger
from resilient.drawing.chart import Scale, panel, ticks, value_scale
from resilient.drawing.picture import LISTED, WIDTH, cut, picture, width
from resilient.drawing.timeline import read, whole
from resilient.exits import EnvironmentUnusable
from resilient.processes import local_pid, local_pids
from resilient.status import draw

SVG = "{http://www.w3.org/2000/svg}"


def event(t: float, what: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": what, "generation": generation, "host": "h", **fields}


def fault(t: float, name: str, kind: str = "exit", **fields: Any) -> dict[str, Any]:
    told = {"ranks": [1], "nodes": [0], "step": 3, "detail": "SIGKILL", "detect_s": 0.1, **fields}
    return event(t, "fault", fault_id=name, kind=kind, **told)


def recovered(t: float, name: str, down_s: float = 0.5, lost: int = 2) -> list[dict[str, Any]]:
    action = event(t - down_s, "action", fault_id=name, name="restart_workers", reason="")
    return [action, event(t, "recovered", fault_id=name, step=4, downtime_s=down_s, lost_steps=lost)]


def campaign(faults: int = 3, every_s: float = 10.0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A run in which a worker dies every so often, and that reaches its target."""
    events = [event(0.0, "run_started", 0, name="toy", target_step=100), event(0.1, "generation_started", 1, world_size=2)]
    for number in range(1, faults + 1):
        t = every_s * number
        events += [fault(t, f"g{number}-1"), *recovered(t + 0.5, f"g{number}-1")]
        events += [event(t + 0.1, "generation_started", number + 1, world_size=2, resumed_step=number)]
        events += [event(t + 1.0, "committed", number, step=number, tier="durable")]
    end = every_s * (faults + 1)
    metrics = [
        {"t": end * step / 100, "step": step, "loss": 9.0 - step / 20, "generation": 1 + int(step * (faults + 1) / 101)}
        for step in range(1, 101)
    ]
    return [*events, event(end, "run_finished", faults + 1, exit_code=0)], metrics


def drawn(text: str) -> ET.Element:
    return ET.fromstring(text)


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def titles(root: ET.Element) -> str:
    return "\n".join(element.text or "" for element in root.iter(f"{SVG}title"))


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [element for element in root.iter() if element.get("class") == name]


def test_every_fault_is_marked_and_named_with_its_kind_its_culprit_and_what_was_done():
    root = drawn(picture(*campaign(3)))
    assert len(of_class(root, "down")) == 3 + 1 and len(of_class(root, "curve")) == 4  # one of them in the key
    assert len([group for group in of_class(root, "fault") if group.find(f"{SVG}line") is not None]) == 3
    said = texts(root)
    assert said.count("exit, rank 1") == said.count("restart workers") == said.count("0.50 s down") == 3
    assert "toy: 100 of 100 steps in 0:40, 3 faults, all recovered" in said
    assert all(f"g{number}-1 at 0:{10 * number}" in titles(root) for number in (1, 2, 3))


def test_a_fault_that_nothing_followed_is_said_to_be_not_recovered():
    events, metrics = campaign(1)
    root = drawn(picture([*events[:-1], fault(19.0, "g9-1", "hang", ranks=[], nodes=[3], detail="silent")], metrics))
    assert "not recovered" in texts(root) and "hang, node 3" in texts(root)
    assert "2 faults, 1 recovered" in "\n".join(texts(root))


def test_a_lost_node_is_named_by_its_number_and_ranks_by_theirs():
    events, metrics = campaign(1)
    lost = [fault(15.0, "a", "node_lost", ranks=[2, 3], nodes=[1]), fault(16.0, "b", "exit", ranks=[*range(9)])]
    root = drawn(picture([*events, *lost], metrics))
    assert "node lost, node 1" in texts(root) and "exit, ranks 0, 1, 2, 3 and 5 more: SIGKILL" in titles(root)


def test_what_stops_no_rank_went_on():
    told = [fault(12.0, "s1", "straggler"), event(12.0, "action", fault_id="s1", name="report", reason="")]
    root = drawn(picture([*campaign(1)[0], *told], campaign(1)[1]))
    assert "went on" in texts(root) and "not recovered" not in texts(root)


def test_a_stop_of_the_command_is_told_of_apart_from_faults():
    events, metrics = campaign(1)
    stopped = [*events[:-1], event(20.0, "run_finished", exit_code=75)]
    again = [*stopped, event(25.0, "run_started", 0, name="toy", target_step=101)]
    step = {"t": 27.5, "step": 101, "loss": 4.0, "generation": 3}
    root = drawn(picture([*again, event(30.0, "run_finished", exit_code=0)], [*metrics, step]))
    assert "ended with status 75" in texts(root) and "command run again" in texts(root) and "7.50 s down" in texts(root)
    assert len(of_class(root, "away")) == 1 + 1  # one of them in the key
    assert "1 fault, all recovered" in "\n".join(texts(root))
    assert "not recovered" not in texts(drawn(picture(stopped, metrics)))


def test_a_command_that_was_killed_shows_although_nothing_tells_of_it():
    events, metrics = campaign(1)
    again = [*events[:-1], event(45.0, "run_started", 0, name="toy", target_step=100)]
    assert "command killed" in texts(drawn(picture(again, metrics)))
    assert "command killed" not in texts(drawn(picture([*events, again[-1]], metrics)))


@pytest.mark.parametrize("metrics", [[], [{"t": 1.0, "step": 1, "loss": float("nan")}]])
def test_a_campaign_without_a_step_has_a_picture(metrics: list[dict[str, Any]]):
    assert "No step was finished." in texts(drawn(picture([], metrics)))


def test_times_at_the_ends_of_what_a_double_holds_have_a_picture():
    events, metrics = campaign(2)
    drawn(picture([*events, {**events[-1], "t": 1.7e308}], [*metrics, {**metrics[-1], "t": -1.7e308}]))
    fault = next(line for line in events if line["event"] == "fault")
    drawn(picture([*(line for line in events if line is not fault), {**fault, "detect_s": 1.7e308}], metrics))
    assert Scale(-1.7e308, 1.7e308, 10.0, 20.0)(1e308) == pytest.approx(10 + 10 * 2.7 / 3.4)


def test_a_torn_ledger_has_a_picture(tmp_path: Path):
    events, metrics = campaign(2)
    lines = [json.dumps(line) for line in events]
    for name, text in (
        (ledger.EVENTS, "\n".join([*lines, lines[-1][:25]])),
        (ledger.METRICS, '{"step": 1, "t"\n' + "\n".join(map(json.dumps, metrics))),
    ):
        (tmp_path / name).write_text(text)
    told = draw(tmp_path, tmp_path / "picture.svg")
    assert "picture.svg" in told
    assert texts(drawn((tmp_path / "picture.svg").read_text())).count("exit, rank 1") == 2


def test_only_a_run_directory_is_drawn_and_only_where_it_can_be_written(tmp_path: Path):
    with pytest.raises(EnvironmentUnusable, match="not a run directory"):
        draw(tmp_path, tmp_path / "picture.svg")
    (tmp_path / ledger.EVENTS).touch()
    with pytest.raises(EnvironmentUnusable, match="cannot be written"):
        draw(tmp_path, tmp_path / "missing/picture.svg")


def test_nothing_of_a_message_is_taken_for_markup():
    events, metrics = campaign(1)
    text = "</text><script>&\x00\x1b[31m\"\ud800'"
    events = [{**line, "name": text} if line["event"] == "run_started" else line for line in events]
    out = picture([*events, fault(15.0, text, text, detail=text)], metrics)
    root = drawn(out.encode().decode())
    assert not [element for element in root.iter() if "script" in element.tag]
    assert any("</text><script>&" in each for each in texts(root))


VALUES = (
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.text(max_size=5) | st.lists(st.integers(0, 3), max_size=2)
)
NAMES = ["run_started", "run_finished", "generation_started", "fault", "action", "recovered", "committed", "validation"]
KEYS = ["step", "loss", "generation", "fault_id", "kind", "ranks", "nodes", "detail", "detect_s", "downtime_s", "lost_steps"]
KEYS += ["exit_code", "name", "target_step", "world_size", "resumed_step", "val_loss"]
FIELDS = {"event": st.sampled_from(NAMES) | VALUES, **dict.fromkeys(KEYS, VALUES)}
LINES = st.lists(st.fixed_dictionaries({"t": st.floats(0, 1e9) | VALUES}, optional=FIELDS), max_size=12)


@given(LINES, LINES)
def test_lines_of_any_kind_give_a_picture(events: list[dict[str, Any]], metrics: list[dict[str, Any]]):
    drawn(picture(events, metrics))


def test_a_long_run_stays_small_and_loses_no_fault():
    metrics = [{"t": step * 901 / 200_000, "step": step, "loss": 1 / step, "generation": step // 223} for step in range(1, 200_001)]
    out = picture(campaign(900, every_s=1.0)[0], metrics)
    assert len(out) < 600_000
    root = drawn(out)
    assert all(f"g{number}-1 at" in titles(root) for number in range(1, 901))
    assert f"and {900 - LISTED} incidents: {900 - LISTED} exit" in texts(root)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e299, 1.7e308, -1.7e308])
def test_a_level_curve_is_drawn_whatever_its_value(value: float):
    y = value_scale([value, value], 100.0, 50.0, from_zero=False)
    assert math.isfinite(y.low) and math.isfinite(y.high) and 100.0 <= y(value) <= 150.0
    assert abs(value) > 1e300 or 110.0 < y(value) < 140.0


@pytest.mark.parametrize(
    "values",
    [
        [-1e308, 1e308],
        [-1.7e308, 1.7e308],
        [1.0, 1.7976e308],
        [5e-324],
        [0.0, 5e-324],
        [1e-323, 5e-323],
        [1e-320, 2e-320],
        [1e16, 1e16 + 2],
    ],
)
def test_a_curve_is_drawn_between_any_two_numbers(values: list[float]):
    y = value_scale(values, 100.0, 50.0, from_zero=False)
    assert all(100.0 <= y(value) <= 150.0 for value in values)
    found = ticks(y.low, y.high, 4)
    assert 1 <= len(found) <= 9
    assert all(y.low <= tick <= y.high for tick in found)
    drawn_ = "".join(
        panel("loss", [(1, float(t), value) for t, value in enumerate(values)], Scale(0, 9, 0, 90), 100, 50, from_zero=False)
    )
    assert "inf" not in drawn_ and "nan" not in drawn_


def test_ten_thousand_faults_are_counted():
    out = picture(*campaign(10_000, every_s=1.0))
    assert len(out) < 600_000
    counted = [int(line.split()[0]) for line in titles(drawn(out)).splitlines() if "incidents:" in line]
    assert sum(counted) == 10_000


@pytest.mark.parametrize("faults", [1, 5, 40])
def test_no_two_labels_lie_on_one_another_and_none_leaves_the_picture(faults: int):
    events, metrics = campaign(faults, every_s=3.0)
    events = [{**line, "detail": "wide MW " * 40} if line["event"] == "fault" else line for line in events]
    boxes = []
    for element in drawn(picture(events, metrics)).iter(f"{SVG}text"):
        if element.get("x") is None or element.get("x") == "15":  # the key's are placed by their group
            continue
        size = {"title": 15.0, "mark": 10.0, "band": 10.0}.get(element.get("class") or "", 11.0)
        wide, x, y = width(element.text or "", size), float(element.get("x", 0)), float(element.get("y", 0))
        left = x - wide * {"end": 1.0, "middle": 0.5}.get(element.get("text-anchor", ""), 0.0)
        boxes.append((left, y - 0.75 * size, left + wide, y + 0.1 * size, element.text))
    for left, _, right, _, text in boxes:
        assert left >= 0 and right <= WIDTH, text
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


@given(st.text(max_size=200), st.floats(20, 400))
def test_a_text_is_cut_to_its_room(text: str, most: float):
    assert width(cut(text, most, 11), 11) <= most


def test_downtime_is_of_the_fault_that_it_belongs_to():
    events, metrics = whole(*campaign(2))
    found = read(events, metrics).incidents
    assert [(each.name, each.down_s, each.lost_steps, each.done) for each in found] == [
        ("g1-1", 0.5, 2, "restart workers"),
        ("g2-1", 0.5, 2, "restart workers"),
    ]


def test_a_campaign_that_does_not_run_here_has_no_process_ids(tmp_path: Path):
    (tmp_path / ledger.EVENTS).write_text(json.dumps(event(1.0, "run_started", 0, run_dir=str(tmp_path))) + "\n")
    assert local_pids(tmp_path, None) == {}
    with pytest.raises(EnvironmentUnusable, match=r"rank 1 of .* does not run on this machine; nothing of this campaign does"):
        local_pid(tmp_path, "rank 1")


def test_the_command_says_nothing_on_its_output_where_there_is_no_process(tmp_path: Path):
    (tmp_path / ledger.EVENTS).touch()
    command = [sys.executable, "-m", "resilient", "status", str(tmp_path), "--pid", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stdout) == (69, "")  # `kill -9 $(...)` then kills nothing
