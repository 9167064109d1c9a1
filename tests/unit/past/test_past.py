"""The past that is kept and the past that is made of all lines are the same, whatever became of the file in between."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_campaign import campaign

from resilient import ledger
from resilient.account import account
from resilient.driver.display import Seen, describe, duration
from resilient.past import order
from resilient.past.fold import KEPT, RECENT, SAID, Past, past_of
from resilient.past.record import FILE, Reader, read
from resilient.recovery.rollback import InvalidationRule

Lines = Sequence[tuple[str, str]]


def line(name: str, entry: dict[str, Any]) -> tuple[str, str]:
    return name, json.dumps(entry) + "\n"


def event(t: float, name: str, generation: int = 1, /, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": name, "generation": generation, "host": "n1", **fields}


def fresh(tmp: Path) -> Path:
    """A run directory without anything."""
    for name in (FILE, ledger.EVENTS, ledger.METRICS):
        for path in tmp.glob(f"{name}*"):
            path.unlink()
    return tmp


def append(run_dir: Path, lines: Lines) -> None:
    for name, text in lines:
        with (run_dir / name).open("a") as file:
            file.write(text)


def told(past: Past, now: float | None = None) -> tuple[object, object]:
    """All that is in it, to the last bit."""
    account_ = copy.deepcopy(past).account(now)
    return account_, repr(msgspec.to_builtins(past, order="sorted"))


def scratch(run_dir: Path) -> Past:
    kept = (run_dir / FILE).rename(run_dir / "aside") if (run_dir / FILE).exists() else None
    found = read(run_dir)
    if kept is not None:
        kept.rename(run_dir / FILE)
    return found


@st.composite
def some_lines(draw: st.DrawFn) -> Lines:
    """Lines of a campaign with times that jump, some that are damaged, and one file ahead of the other."""
    kinds = ["step"] * 4 + ["steps"] * 2 + ["snapshot"] * 3 + ["replicated", "stale", "fault", "action", "recovered", "generation"]
    kinds += ["started", "finished", "validation", "committed", "rejected", "roll_back", "damaged", "wrong", "spoiled", "elsewhere"]
    times = st.floats(-3, 40) | st.integers(-2, 2)
    found: list[tuple[str, str]] = [line(ledger.EVENTS, event(0.0, "run_started", 0, name="x", target_step=9))]
    t, generation = 0.0, 1
    for number, (kind, ahead_s) in enumerate(draw(st.lists(st.tuples(st.sampled_from(kinds), times), max_size=60))):
        t = max(0.0, t + ahead_s)
        step = draw(st.integers(0, 9))
        base = {"generation": generation, "step": step}
        where = {"ranks": [1], "nodes": [0], "detail": "", "evidence": "", "detect_s": draw(st.floats(0, 9))}
        match kind:
            case "step":
                loss = draw(st.sampled_from([1, 2.5, math.nan, math.inf, None]))
                found.append(line(ledger.METRICS, {"t": t, **base, "loss": loss, "step_s": draw(st.floats(0, 9)), "data_s": 0.1}))
            case "snapshot":
                of = draw(st.sampled_from([{}, {"count": 3}, {"stall_s": None}]))
                more = {"tier": "ram", "stall_s": draw(st.floats(0, 5)), **of}
                found.append(line(ledger.EVENTS, event(t, kind, generation, step=step, **more)))
            case "replicated":
                found.append(line(ledger.EVENTS, event(t, kind, generation, step=step, tier="ram")))
            case "steps":  # that nothing disturbs; a snapshot is told before the next one ends, or later
                for number_of_step in range(step, step + draw(st.integers(2, 9))):
                    took_s = draw(st.floats(0.1, 2))
                    t += took_s
                    pace = {"step_s": took_s * 0.9, "data_s": 0.01}
                    found.append(line(ledger.METRICS, {"t": t, **base, "step": number_of_step, **pace}))
                    late_s = draw(st.sampled_from([0.0, 0.05, 2.5]))
                    more = {"tier": "ram", "stall_s": draw(st.sampled_from([0.01, 0.5]))}
                    found.append(line(ledger.EVENTS, event(t + late_s, "snapshot", generation, step=number_of_step, **more)))
            case "stale":  # of a generation that is over
                found.append(line(ledger.METRICS, {"t": t, **base, "generation": generation - 1, "step_s": 1.0, "loss": 7}))
            case "fault":
                name = draw(st.sampled_from(["exit", "hang", "storage", "time_limit"]))
                found.append(line(ledger.EVENTS, event(t, kind, generation, fault_id=f"f{number}", kind=name, step=step, **where)))
            case "action":
                name = draw(st.sampled_from(["restart_workers", "wait", "report", "grow", "give_up"]))
                of = f"f{number - draw(st.integers(1, 4))}"
                found.append(line(ledger.EVENTS, event(t, kind, generation, fault_id=of, name=name, reason="")))
            case "roll_back":
                done = event(t, "action", generation, fault_id="f1", name=kind, reason="", step=step, skip=[[step, step + 2]])
                found.append(line(ledger.EVENTS, done))
            case "recovered":
                of = f"f{number - draw(st.integers(1, 5))}"
                found.append(line(ledger.EVENTS, event(t, kind, generation, fault_id=of, step=step, downtime_s=1, lost_steps=2)))
            case "generation":
                generation += 1
                found.append(
                    line(ledger.EVENTS, event(t, "generation_started", generation, nodes=[], world_size=step, resumed_step=step))
                )
            case "started":
                found.append(line(ledger.EVENTS, event(t, "run_started", 0, name="x", target_step=None, run_dir="/x")))
            case "finished":
                found.append(line(ledger.EVENTS, event(t, "run_finished", generation, exit_code=75, step=step)))
            case "validation":
                found.append(line(ledger.EVENTS, event(t, kind, generation, step=step, val_loss=2)))
            case "committed" | "rejected":
                name = "committed" if kind == "committed" else "checkpoint_rejected"
                found.append(line(ledger.EVENTS, event(t, name, generation, step=step, reason="")))
            case "damaged":
                found.append((draw(st.sampled_from([ledger.EVENTS, ledger.METRICS])), '{"t": 1, "event": "fau\x00\n'))
            case "wrong":
                found.append(line(ledger.EVENTS, event(t, "fault", 10**30, fault_id=3, kind=None)))
            case "spoiled":
                found.append(line(ledger.METRICS, {"t": t, **base, "event": "fault", "loss": 10**25, "steps": "x", "step_s": 0.5}))
            case "elsewhere":
                found.append(line(ledger.EVENTS, event(draw(st.floats(0, 9)), "note", generation, text="\ud800" * 3)))
    return found


@pytest.fixture(autouse=True)
def short_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "AHEAD_LINES", 3)
    monkeypatch.setattr(order, "AHEAD_S", 20.0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@given(some_lines(), st.data())
def test_whenever_it_was_kept_the_past_is_that_of_all_lines(run_dir: Path, lines: Lines, data: st.DataObject):
    fresh(run_dir)
    reader = Reader(run_dir)
    at = 0
    while at < len(lines):
        step = data.draw(st.integers(1, max(1, len(lines) - at)))
        append(run_dir, lines[at : at + step])
        at += step
        watched = reader.read() if data.draw(st.booleans()) else None
        if data.draw(st.booleans()):
            kept = Reader(run_dir)
            kept.read()
            kept.keep()
        if watched is not None:
            assert told(watched, 900.0) == told(scratch(run_dir), 900.0)
    assert told(read(run_dir)) == told(scratch(run_dir))


def one_by_one(run_dir: Path) -> Past:
    """What the lines come to if each is decoded and folded by itself."""
    found = past_of(ledger.read_events(run_dir / ledger.EVENTS), ledger.read_metrics(run_dir / ledger.METRICS))
    for each in ledger.read(run_dir / ledger.EVENTS):
        found.event(each, 0, valid=False)  # of which not even that they are events is known
    for each in ledger.read(run_dir / ledger.METRICS):
        found.metrics(each, valid=False)
    return found


@given(some_lines())
def test_many_lines_at_once_come_to_the_same_as_one_by_one(run_dir: Path, lines: Lines):
    append(fresh(run_dir), lines)
    found = read(run_dir)
    found.began_at = 0
    assert told(found) == told(one_by_one(run_dir))


@given(some_lines(), st.data())
def test_a_file_that_is_cut_off_or_spoiled_changes_nothing(run_dir: Path, lines: Lines, data: st.DataObject):
    fresh(run_dir)
    kept_at = data.draw(st.integers(0, len(lines)))
    append(run_dir, lines[:kept_at])
    reader = Reader(run_dir)
    reader.read()
    reader.keep()
    append(run_dir, lines[kept_at:])
    expected = told(scratch(run_dir))
    whole = (run_dir / FILE).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    (run_dir / FILE).write_bytes(whole[:cut])
    assert told(read(run_dir)) == expected
    (run_dir / FILE).write_bytes(whole[:cut] + bytes([whole[cut] ^ 1]) + whole[cut + 1 :])
    assert told(read(run_dir)) == expected


@given(some_lines(), some_lines(), st.data())
def test_the_file_of_another_ledger_changes_nothing(run_dir: Path, lines: Lines, others: Lines, data: st.DataObject):
    fresh(run_dir)
    append(run_dir, others)
    reader = Reader(run_dir)
    reader.read()
    reader.keep()
    kept = (run_dir / FILE).read_bytes()
    fresh(run_dir)
    append(run_dir, [*others[: data.draw(st.integers(0, len(others)))], *lines])
    expected = told(read(run_dir))
    (run_dir / FILE).write_bytes(kept)
    assert told(read(run_dir)) == expected
    assert told(reader.read()) == expected


@given(some_lines(), st.data())
def test_a_line_that_is_being_written_is_taken_once_it_is_there(run_dir: Path, lines: Lines, data: st.DataObject):
    fresh(run_dir)
    append(run_dir, lines[:-1])
    name, text = lines[-1]
    cut = data.draw(st.integers(0, len(text)))
    append(run_dir, [(name, text[:cut])])
    reader = Reader(run_dir)
    assert told(reader.read()) == told(scratch(run_dir))
    reader.keep()
    append(run_dir, [(name, text[cut:])])
    assert told(reader.read()) == told(read(run_dir)) == told(scratch(run_dir))


@given(some_lines(), st.data())
def test_files_that_were_moved_aside_are_read_on(run_dir: Path, lines: Lines, data: st.DataObject):
    fresh(run_dir)
    append(run_dir, lines)
    expected = told(read(run_dir))
    fresh(run_dir)
    first, second = sorted(data.draw(st.tuples(*[st.integers(0, len(lines))] * 2)))
    for begin, end in ((0, first), (first, second)):
        append(run_dir, lines[begin:end])
        reader = Reader(run_dir)
        reader.read()
        reader.keep()
        for name in (ledger.EVENTS, ledger.METRICS):
            if (run_dir / name).exists():
                if (run_dir / f"{name}.1").exists():
                    (run_dir / f"{name}.1").rename(run_dir / f"{name}.2")
                (run_dir / name).rename(run_dir / f"{name}.1")
    append(run_dir, lines[second:])
    assert told(read(run_dir)) == told(scratch(run_dir)) == expected
    for name in (ledger.EVENTS, ledger.METRICS):
        texts = [text for of, text in lines if of == name]
        assert len(list(ledger.read(run_dir / name))) == sum(ledger.parsed(text.encode()) is not None for text in texts)


def test_a_long_campaign_is_the_same_in_pieces_and_stays_small(tmp_path: Path):
    lines = [line(name, entry) for name, entry in campaign(steps=3000, faults=250, jobs=130)]
    sizes = []
    for begin in range(0, len(lines), 1000):
        append(tmp_path, lines[begin : begin + 1000])
        reader = Reader(tmp_path)
        reader.read()
        reader.keep()
        sizes.append((tmp_path / FILE).stat().st_size)
    assert told(read(tmp_path)) == told(scratch(tmp_path))
    found = read(tmp_path)
    assert told(msgspec.structs.replace(found, began_at=0)) == told(one_by_one(tmp_path))
    every = account(ledger.read_events(tmp_path / ledger.EVENTS), ledger.read_metrics(tmp_path / ledger.METRICS))
    kept = copy.deepcopy(found).account(None)
    assert (kept.seconds, kept.wall_s, kept.kinds) == (every.seconds, every.wall_s, every.kinds)
    assert (kept.incidents, kept.runs) == (every.incidents[-KEPT:], every.runs[-KEPT:])
    assert found.faults == 250 == sum(kind.faults for kind in kept.kinds.values())
    assert sizes[-1] < 1.1 * max(sizes[len(sizes) // 2 :][:3])


def test_little_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = [line(name, entry) for name, entry in campaign(steps=1500, faults=20, jobs=3)]
    append(tmp_path, lines)
    reader = Reader(tmp_path)
    reader.read()
    reader.keep()
    append(tmp_path, lines[-2:])
    parsed, count = ledger.parsed, []
    monkeypatch.setattr(ledger, "parsed", lambda text: count.append(1) or parsed(text))
    read(tmp_path)
    assert len(count) < 10
    count.clear()
    steps = [line(ledger.METRICS, {"t": 2e9 + number, "generation": 1, "step": number, "step_s": 1.0}) for number in range(2000)]
    append(tmp_path, steps)  # and not an event among them
    found = Reader(tmp_path)
    found.read()
    found.keep()
    count.clear()
    read(tmp_path)
    assert len(count) < 50


@pytest.mark.parametrize("steps", [1, 20])
def test_the_pace_is_that_of_the_last_steps_however_many_a_line_tells_of(steps: int):
    past = Past()
    for line in range(1, 200 // steps + 1):
        step_s = 1.0 if line * steps <= 100 else 0.002
        past.metrics({"step": line * steps, "step_s": step_s, "steps": steps, "generation": 1, "t": 1.0 * line}, valid=True)
    assert past.step_s == pytest.approx(0.002, rel=0.05)


def stepped(generation: int, *seconds: float, t: float = 0.0) -> list[dict[str, Any]]:
    """Lines of metrics of one generation."""
    return [
        {"t": t + number, "step": number, "generation": generation, "step_s": step_s} for number, step_s in enumerate(seconds, 1)
    ]


@pytest.mark.parametrize(
    ("lines", "step_s"),
    [
        pytest.param([*stepped(1, 180.0)], 180.0, id="nothing else is known"),
        pytest.param([*stepped(1, 180.0, 1.0)], 1.0, id="the second step takes its place"),
        pytest.param([*stepped(1, 180.0, 1.0, 2.0)], 1.1, id="from then on each counts for a tenth"),
        pytest.param([*stepped(1, 180.0, 1.0), *stepped(2, 180.0, t=9.0)], 1.0, id="a restart"),
        pytest.param([*stepped(1, 180.0, 1.0), *stepped(2, 180.0, 2.0, t=9.0)], 1.1, id="after a restart"),
        pytest.param([*stepped(1, 180.0), *stepped(2, 90.0, t=9.0)], 90.0, id="a restart after one step"),
        pytest.param([*stepped(1, 180.0), *stepped(2, 90.0, 1.0, t=9.0)], 1.0, id="two steps after a restart after one step"),
    ],
)
def test_the_first_step_of_a_generation_is_no_measure_of_the_others(tmp_path: Path, lines: list[dict[str, Any]], step_s: float):
    append(tmp_path, [line(ledger.METRICS, each) for each in lines])
    assert past_of([], lines).step_s == read(tmp_path).step_s == pytest.approx(step_s)
    seen = Seen()
    for each in lines:
        seen.metrics(each)
    assert seen.left(lines[-1]["step"] + 1000) == duration(1000 * step_s)


def test_a_late_line_is_put_where_it_belongs(tmp_path: Path):
    append(tmp_path, [line(ledger.EVENTS, event(0.0, "run_started", 0, name="x", target_step=9))])
    append(tmp_path, [line(ledger.METRICS, {"t": 10.0 * n, "generation": 1, "step": n, "step_s": 10.0}) for n in range(1, 40)])
    reader = Reader(tmp_path)
    reader.read()
    reader.keep()
    late = event(95.0, "fault", fault_id="f1", kind="exit", ranks=[], nodes=[], step=9, detail="", evidence="", detect_s=0.5)
    append(tmp_path, [line(ledger.EVENTS, late)])
    assert told(reader.read()) == told(read(tmp_path)) == told(scratch(tmp_path))


def test_a_ledger_that_is_the_same_up_to_a_mark_and_goes_on_otherwise_is_another_one(tmp_path: Path):
    start = line(ledger.EVENTS, event(0.0, "run_started", 0, name="x", target_step=9))
    step = line(ledger.METRICS, {"t": 0.0, "generation": 1, "step": 1, "step_s": 0.5})
    append(tmp_path, [start, step, line(ledger.EVENTS, event(0.0, "note"))])  # after the step
    reader = Reader(tmp_path)
    reader.read()
    fresh(tmp_path)
    append(tmp_path, [start, step, start])  # before it
    assert told(reader.read()) == told(read(tmp_path))


def test_what_a_start_needs_of_earlier_jobs(tmp_path: Path):
    assert read(tmp_path).generation == 0
    base = {"fault_id": "g2-1", "reason": "", "name": "roll_back"}
    lines = [
        line(ledger.EVENTS, event(1.0, "run_started", 0, name="x", target_step=9, run_dir="/runs/x")),
        line(ledger.EVENTS, {"generation": 7}),  # no event, and yet it was used
        line(ledger.EVENTS, event(2.0, "action", 2, **base, step=10, skip=[])),
        line(ledger.EVENTS, event(3.0, "action", 4, **{**base, "name": "finish_drain"}, step=5, skip=[[13, 16]])),
        line(ledger.EVENTS, event(4.0, "action", 9 - 3, **base, step=40, skip=[[17, 17], [50, 52]])),
        line(ledger.METRICS, {"step": 44}),
        line(ledger.EVENTS, event(5.0, "committed", 4, step=40)),
        line(ledger.EVENTS, event(5.0, "committed", 4, step=42)),
        line(ledger.EVENTS, event(6.0, "checkpoint_rejected", 4, step=42, reason="damaged")),
    ]
    append(tmp_path, lines)
    found = read(tmp_path)
    assert (found.generation, found.metrics_step, found.run_dir, found.durable) == (7, 44, "/runs/x", [40])
    assert found.invalidated == [InvalidationRule(4, 5), InvalidationRule(6, 40)]
    assert found.skip == [(13, 17), (50, 52)]


def test_a_checkpoint_that_was_refused_is_not_the_newest():
    def newest(*events: dict[str, Any]) -> tuple[int | None, float, list[int]]:
        found = past_of([event(1.0, "run_started", 0, name="x", target_step=99), *events], [])
        return found.checkpoint_step, found.checkpoint_t, found.durable

    made = [event(float(step), "committed", step=step, tier="disk") for step in (10, 20, 30)]
    refused = [event(40.0, "checkpoint_rejected", step=step, tier="disk", reason="") for step in (30, 20, 10)]
    assert newest(*made, refused[0]) == (20, 20.0, [10, 20])
    assert newest(*made, *refused[1::-1]) == newest(*made, *refused[:2]) == (10, 10.0, [10])
    assert newest(*made, *refused) == (None, 0.0, [])
    assert newest(*made, {**refused[0], "tier": "ram"}) == (30, 30.0, [10, 20, 30])  # the one on disk is as good as it was
    assert newest(*made, refused[0], event(50.0, "committed", 2, step=30, tier="disk")) == (30, 50.0, [10, 20, 30])


def test_a_step_that_a_lost_node_is_late_to_tell_of_is_not_the_last_one():
    steps = [{"t": 2.0 + n, "step": n, "generation": 2, "loss": 1.0 * n, "step_s": 1.0, "tokens_per_s": 5.0} for n in (1, 2, 3)]
    late = {**steps[0], "t": 2.5, "generation": 1, "loss": 9.0, "step_s": 99.0}
    found = past_of([event(1.0, "run_started", 0, name="x", target_step=9)], [*steps, late])
    assert (found.step, found.loss, found.step_s) == (3, 3.0, 1.0)
    gone_on = past_of([event(1.0, "run_started", 0, name="x", target_step=9)], [late, steps[0]])
    assert (gone_on.step, gone_on.loss) == (1, 1.0)


def test_the_newest_lines_that_a_person_reads_are_kept():
    link = {"node": 0, "interface": "eth0", "detail": "", "down_s": 1.0}
    samples = [event(float(n), "link", **link, state="up") for n in range(20)]
    assert [json.loads(text)["t"] for text in past_of(samples, ()).recent] == list(range(20))[-RECENT:]
    assert describe(samples[0]) is not None and "link" in SAID and "snapshot" not in SAID


def test_checkpoints_that_a_tier_misses_again_and_again_are_one_of_the_lines_that_a_person_reads():
    def missed(t: float, tier: str, count: int) -> dict[str, Any]:
        return event(t, "checkpoint_missed", step=int(t), tier=tier, reason="no buffer was free", count=count)

    def shown(*lines: dict[str, Any]) -> list[tuple[float, str]]:
        return [(each["t"], each["event"]) for each in map(json.loads, past_of(lines, ()).recent)]

    up = event(1.0, "link", node=0, interface="eth0", detail="", down_s=1.0, state="up")
    both = [missed(10.0 + n, tier, 1 << n) for n in range(20) for tier in ("nvme", "durable")]
    assert shown(up, *both) == [(1.0, "link"), (29.0, "checkpoint_missed"), (29.0, "checkpoint_missed")]
    told = [json.loads(text)["tier"] for text in past_of([up, *both], ()).recent[1:]]
    assert told == ["nvme", "durable"]
    later = {**up, "t": 40.0}  # what is between two of them parts them
    assert shown(missed(2.0, "nvme", 1), later, missed(41.0, "nvme", 2)) == [
        (2.0, "checkpoint_missed"), (40.0, "link"), (41.0, "checkpoint_missed"),
    ]  # fmt: skip
