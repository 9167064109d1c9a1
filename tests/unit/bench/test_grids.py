"""Grids, rows, energy and results: what is pure of them, and files as they are on disks."""

import fcntl
import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import Browser, looks_right

from resilient.bench import command, results
from resilient.bench.command import bench
from resilient.bench.energy import Counter, Meter, counters
from resilient.bench.grid import GridError, read, shown_keys
from resilient.bench.page import drawn
from resilient.bench.rows import Row, Spread, looked_into, measured, window
from resilient.config import load
from resilient.exits import EnvironmentUnusable
from resilient.interruption import Interrupted
from resilient.steptime.work import Work

ROOT = Path(__file__).parents[3]


def grid(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return path


def test_a_grid_is_the_product_of_its_axes_and_its_further_cells_each_once(tmp_path: Path):
    text = "name: g\naxes: {parallel.tp: [1, 2], train.micro_batch_size: [2, 4]}\ncells: [{parallel.tp: 4}, {parallel.tp: 4}]\n"
    _, cells = read(grid(tmp_path, text))
    assert [shown_keys(cell.keys) for cell in cells] == [
        "tp 1, micro_batch_size 2", "tp 1, micro_batch_size 4", "tp 2, micro_batch_size 2", "tp 2, micro_batch_size 4", "tp 4",
    ]  # fmt: skip
    assert [cell.number for cell in cells] == [1, 2, 3, 4, 5]
    assert len({cell.mark for cell in cells}) == 5
    assert cells[2].config["parallel"] == {"tp": 2}


def test_a_cell_is_the_file_then_the_grids_config_then_its_keys_and_as_long_as_the_grid_says(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(
        "model: {layers: 3, hidden: 64}\ntrain: {samples: 1000, global_batch_size: 8}\n"
        "optimizer: {warmup_samples: 500}\nlogging: {sinks: {webhook: {url: 'http://there/'}}}\n"
    )
    text = "name: g\nfile: base.yaml\nconfig: {model: {hidden: 128}}\naxes: {model.layers: [5]}\nwarmup_steps: 2\nsteps: 7\n"
    _, [cell] = read(grid(tmp_path, text))
    path = tmp_path / "cell.yaml"
    path.write_text(json.dumps(cell.config))
    config = load(path)
    assert (config.model.layers, config.model.hidden, config.train.global_batch_size) == (5, 128, 8)
    assert config.train.steps == 9
    assert config.logging.sinks.wanted == {}


def test_a_cell_whose_config_changes_is_another_one(tmp_path: Path):
    marks = set()
    for steps in (7, 8):
        _, [cell] = read(grid(tmp_path, f"name: g\nsteps: {steps}\n"))
        marks.add(cell.mark)
    assert len(marks) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: g\naxis: {}\n", r"grid.yaml:2: axis: unknown key; did you mean 'axes'\? allowed here: name, about, "),
        ("name: g\naxes: {parallel.tp: []}\n", r"grid.yaml:2: axes.parallel.tp = \[\]: allowed: a list, not empty$"),
        ("name: g\naxes: {parallel.tp: 2}\n", "grid.yaml:2: axes.parallel.tp = 2: allowed: a list$"),
        ("name: g\naxes: {Parallel.TP: [2]}\n", r"grid.yaml:2: axes.Parallel.TP: as a key, allowed: text, of the form \^\[a-z_\]"),
        ("name: g\ncells: [{a b: 2}]\n", "grid.yaml:2: cells.0.a b: as a key, allowed: text, of the form"),
        ("name: ../g\n", r"grid.yaml:1: name = ../g: allowed: text, of the form \^"),
        ("about: x\n", "grid.yaml: name: is missing"),
        ("name: g\nfile: nowhere.yaml\n", "there is no such file"),
        ("name: g\nsteps: 1\n", "grid.yaml:2: steps = 1: allowed: a whole number, at least 2"),
        ("name: g\nsteps: 1\naxis: {}\n", "(?s)grid.yaml:2: steps.*grid.yaml:3: axis"),
        ("[1, 2]\n", "grid.yaml:1: a grid is a mapping of keys to values"),
        (
            "name: g\naxes:\n  parallel.tp: [1, 2]\n  parallel.tp: [4]\n",
            "grid.yaml:4: axes.parallel.tp: stands twice; it was set in line 3",
        ),
        (
            "name: g\ncells:\n  - {a: 1, b: {c: 1,\n      c: 2}}\n",
            "grid.yaml:4: cells.0.b.c: stands twice; it was set in line 3 already",
        ),
        ("name: g\naxes: {" + ", ".join(f"a.k{n}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for n in range(5)) + "}\n", "more than 10,000"),
    ],
)
def test_what_is_no_grid_is_refused_in_words(tmp_path: Path, text: str, words: str):
    with pytest.raises(GridError, match=words):
        read(grid(tmp_path, text))


def test_a_key_may_be_inside_of_another_one_and_neither_changes_the_other_cells(tmp_path: Path):
    text = (
        "name: g\naxes: {train: [{micro_batch_size: 2}], train.global_batch_size: [8, 16]}\n"
        "cells: [{train.guard: null, train.guard.spike: 5.0}]\n"
    )
    _, cells = read(grid(tmp_path, text))
    sizes = [(cell.config["train"].get("micro_batch_size"), cell.config["train"].get("global_batch_size")) for cell in cells]
    assert sizes == [(2, 8), (2, 16), (None, None)]
    assert cells[0].keys == {"train": {"micro_batch_size": 2}, "train.global_batch_size": 8}
    assert cells[2].config["train"]["guard"] == {"spike": 5.0}


@pytest.mark.parametrize("path", sorted((ROOT / "grids").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_grids_are_grids(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("SCRATCH", "PROJECT"):
        monkeypatch.setenv(name, str(tmp_path))
    found, cells = read(path)
    assert found.name == path.stem and len(cells) > 1
    config = tmp_path / "cell.yaml"
    config.write_text(json.dumps(cells[0].config))
    load(config)


def line(step: int, generation: int = 1, step_s: float = 0.5, t: float | None = None) -> dict[str, object]:
    end = float(step) if t is None else t
    return {
        "step": step,
        "generation": generation,
        "t": end,
        "step_s": step_s,
        "tokens_per_s": 100 / step_s,
        "memory_bytes": 10 * step,
    }


def test_steps_of_the_warm_up_do_not_count():
    lines = [line(1, step_s=90.0), line(2, step_s=50.0), *(line(step, step_s=step / 10) for step in range(3, 8))]
    found = measured(lines, 2)
    assert found["steps"] == 5
    assert found["step_s"] == Spread(0.5, 0.4, 0.6)
    assert found["tokens_per_s"].median == 200
    assert found["memory_bytes"] == 70
    assert found["mfu"] is None


def test_after_a_restart_the_steps_of_the_last_generation_count_behind_a_warm_up_of_their_own():
    lines = [line(step) for step in range(1, 9)] + [line(step, 2, step_s=0.25) for step in range(6, 12)]
    found = measured(lines, 2)
    assert (found["steps"], found["step_s"].median) == (4, 0.25)


def test_a_step_that_was_looked_into_says_what_tensors_take_and_how_much_of_it_was_communication():
    seen = {"tensor_bytes": 900, "state_bytes": 300, "step_s": 2.0, "collective_s": 0.5, "transfer_s": 0.1}
    lines = [line(1), {**line(2), "inspected": seen}, line(3)]
    assert looked_into(lines) == {"tensor_bytes": 900, "state_bytes": 300, "collectives": 0.25, "transfers": 0.05}
    assert looked_into([line(1), {**line(2), "inspected": "nonsense"}]) == {}


def test_a_campaign_that_never_came_behind_the_warm_up_is_not_measured():
    assert measured([line(1), line(2)], 2) == {}
    assert window([line(1), line(2)], 2) is None


def test_the_window_is_that_of_the_steps_that_count():
    assert window([line(step) for step in range(1, 5)], 2) == (2.5, 4.0, 200)


def test_energy_lies_between_two_readings_and_counters_may_wrap():
    read = iter([90.0, 95.0, 5.0])
    steady = iter([0.0, 10.0, 20.0])
    meter = Meter([Counter("RAPL", lambda: next(read), 100.0), Counter("NVML", lambda: next(steady))])
    for t in (0.0, 10.0, 20.0):
        meter.sample(t)
    assert meter.joules(0.0, 20.0) == 35.0
    assert meter.joules(5.0, 15.0) == 7.5 + 10.0
    assert meter.joules(5.0, 25.0) is None
    assert meter.source == "NVML and RAPL"


def test_rapl_is_read_from_whole_packages(tmp_path: Path):
    for zone, joules in (("intel-rapl:0", 5), ("intel-rapl:0:0", 3), ("intel-rapl:1", 7)):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "energy_uj").write_text(f"{joules}000000\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("262143328850\n")
    found = [each for each in counters(tmp_path) if each.source == "RAPL"]
    assert sorted(each.read() for each in found) == [5.0, 7.0]


def test_where_nothing_measures_there_is_no_energy():
    with Meter([]) as meter:
        meter.sample(1.0)
        meter.sample(2.0)
    assert meter.joules(1.0, 2.0) is None
    assert meter.source == ""


def row(mark: str, speed: float | None, world_size: int = 4, **more: object) -> Row:
    spread = None if speed is None else Spread(speed, speed, speed)
    state = "failed" if speed is None else "measured"
    fields = {"why": "it died" if speed is None else "", "world_size": world_size, "tokens_per_s": spread, "step_s": spread}
    return Row(mark, {"parallel.tp": int(mark)}, state, **{**fields, **more})


def test_results_are_read_back_also_behind_a_line_that_was_cut_short(tmp_path: Path):
    path = grid(tmp_path, "name: g\naxes: {parallel.tp: [1, 2, 3]}\n")
    _, cells = read(path)
    rows = [row(str(number), 10.0 * number) for number in (1, 2, 3)]
    marked = [Row(**{**vars(each), "mark": cell.mark}) for each, cell in zip(rows, cells, strict=True)]
    results.append(tmp_path, marked[0])
    with (tmp_path / results.FILE).open("a") as file:
        file.write('{"mark": "cut')
    results.append(tmp_path, marked[1])
    results.append(tmp_path, row("99", 5.0))  # of a cell that is not in the grid any more
    assert list(results.read(tmp_path, cells).values()) == marked[:2]


def test_the_best_has_the_most_tokens_per_rank_and_is_yaml_that_a_config_takes(tmp_path: Path):
    rows = [row("1", 100.0), row("2", 150.0, world_size=8), row("3", None)]
    winner = results.write_best(rows, tmp_path / "best.yaml")
    assert winner.mark == "1"
    assert load(tmp_path / "best.yaml").parallel.tp == 1
    with pytest.raises(EnvironmentUnusable, match="no cell was measured"):
        results.write_best([row("3", None)], tmp_path / "best.yaml")


def test_where_no_cell_tells_tokens_none_is_the_best_and_the_reason_is_not_that_none_was_measured(tmp_path: Path):
    with pytest.raises(EnvironmentUnusable, match="no cell tells tokens per second, by which they are compared"):
        results.write_best([row("1", 100.0, tokens_per_s=None), row("3", None)], tmp_path / "best.yaml")


def test_every_row_is_shown_with_the_reason_where_there_is_one():
    rows = [row("1", 100.0), row("2", 150.0), row("3", None)]
    table = results.table(rows)
    assert table.row_count == 2
    assert [str(cell) for cell in table.columns[0].cells] == ["tp 2", "tp 1"]
    assert results.not_measured(rows) == ["failed: tp 3: it died"]


def worked(mark: str, step_s: float, flops: float) -> Row:
    return row(
        mark, 100 / step_s, step_s=Spread(step_s, step_s, step_s), work=Work(flops=flops), tensor_bytes=900, predicted_bytes=1000
    )


def test_how_well_the_order_of_steps_is_predicted_is_said_from_three_rows_on():
    rows = [worked("1", 1.0, 10.0), worked("2", 2.0, 20.0), worked("3", 3.1, 30.0)]
    assert results.agreement(rows[:2]) is None
    said = results.agreement(rows)
    assert said is not None and "measured ones 1.00, and 1.00 where each row" in said
    [by_fit] = [list(column.cells) for column in results.table(rows).columns if column.header == "by fit"]
    assert by_fit == ["1,010.6", "2,021.3", "3,031.9"]
    reversed_ = [worked("1", 1.0, 30.0), worked("2", 2.0, 20.0), worked("3", 3.0, 10.0)]
    assert "measured ones -1.00" in str(results.agreement(reversed_))


def test_the_page_stands_alone_is_well_formed_and_has_every_row():
    odd = Row("4", {"parallel.tp": "<b>&"}, "failed", "it <died> & said so")
    page = drawn("layouts", "a & b", [worked("1", 1.0, 10.0), worked("2", 2.0, 20.0), worked("3", 3.1, 30.0), odd], 5)
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    assert not [each for each in tree.iter() if each.get("src") or each.get("href") or each.tag in ("script", "link")]
    text = "".join(tree.itertext())
    assert "4 of 5 cells" in text and "it <died> & said so" in text and "tp <b>&" in text
    drawings = {each.get("aria-label"): len(list(each.iter("rect"))) for each in tree.iter("svg") if each.get("role")}
    assert drawings == {"Tokens a second and rank": 3, "A step, ms": 6, "Memory of rank 0, MiB": 6}


def test_the_page_is_read_in_any_window_without_an_error(browser: Browser, tmp_path: Path):
    rows = [worked(str(number), 1.0 + number, 10.0 * number) for number in range(1, 5)]
    rows = [replace(each, collectives=0.2, transfers=0.1, bubble=0.05) for each in rows]
    rows += [
        replace(rows[0], keys={"parallel.tp": 2, "parallel.pp": 2, "train.micro_batch_size": 16, "model.attention": "sdpa_math"})
    ]
    rows += [Row("9", {"parallel.tp": 3}, "failed", "no such path: " + "/a/path/without/a/space" * 9)]
    path = tmp_path / "index.html"
    path.write_text(drawn("layouts", "Layouts of four ranks.", rows, 9))
    looks_right(browser, path)


def test_a_page_of_nothing_yet_is_a_page():
    ElementTree.fromstring(drawn("layouts", "", [], 5).removeprefix("<!DOCTYPE html>"))


# -- the command ---------------------------------------------------------------------------------------------------------


REFUSED = "name: g\nconfig: {cluster: {procs_per_node: 1, device: cpu}}\ncells: [{parallel.tp: 3, data.text: ['/[there]/:key:']}]\n"


def test_cells_and_paths_are_named_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bench(grid(tmp_path, REFUSED), directory=tmp_path / "[red]", again=False, best=None)
    said = capsys.readouterr().out
    assert "1 of 1: tp 3, text ['/[there]/:key:']" in said and f"drawn in {tmp_path}/[red]/index.html" in said


def test_two_commands_do_not_measure_in_one_directory(tmp_path: Path):
    with (tmp_path / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentUnusable, match="another `resilient bench` measures in"):
            bench(grid(tmp_path, REFUSED), directory=tmp_path, again=False, best=None)
    assert not list(results.every(tmp_path / results.FILE))
    bench(grid(tmp_path, REFUSED), directory=tmp_path, again=False, best=None)
    assert [each.state for each in results.every(tmp_path / results.FILE).values()] == ["refused"]


def test_what_was_measured_is_shown_where_nothing_can_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bench(grid(tmp_path, REFUSED), directory=tmp_path, again=False, best=None)
    for name in (".lock", "index.html"):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    capsys.readouterr()
    with pytest.raises(EnvironmentUnusable, match=r"index\.html cannot be written"):
        bench(grid(tmp_path, REFUSED), directory=tmp_path, again=False, best=None)
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize("ignored", [True, False])
def test_a_hangup_ends_it_unless_it_is_ignored_as_under_nohup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignored: bool):
    def cell(*_: object) -> Row:
        os.kill(os.getpid(), signal.SIGHUP)
        return Row("x", {}, "refused")

    monkeypatch.setattr(command, "run_cell", cell)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with nullcontext() if ignored else pytest.raises(Interrupted, match="stopped by SIGHUP"):
            bench(grid(tmp_path, REFUSED), directory=tmp_path, again=False, best=None)
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
