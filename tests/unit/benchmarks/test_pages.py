"""What benchmarks have found, from a script's figures to the pages: nothing on them is typed by hand, and what failed says so."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]

# Not to be left on the path: benchmarks/trainer.py would be the package `trainer`.
sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import figures
    import pages
finally:
    sys.path.remove(str(ROOT / "benchmarks"))

README = "before\n<!-- figures -->\nold\n<!-- end -->\nafter\n<!-- end -->\n"
FINDS = """
import argparse
import figures

parser = argparse.ArgumentParser()
parser.add_argument("--stops")
args = figures.arguments(parser)
figures.save(args.json, "What it means.", [figures.figure("kill/torchrun", "killed", "s", [0.2, 0.3, 0.7], "torchrun", [3.0, 6.0])])
"""
STARTS = """
import argparse
import subprocess
from dataclasses import replace
from pathlib import Path

import figures

figures.arguments(argparse.ArgumentParser())
process = subprocess.Popen(["sleep", "600"])
Path("started").write_text(str(process.pid))
try:
    process.wait()
finally:
    process.kill()
    process.wait()
"""


def result(*found: figures.Figure, benchmark: str = "recovery", error: str = "") -> figures.Result:
    return figures.measured(benchmark, "What it means.", found, ["--kills", "3"], {"peer": "1.2"}, error)


def test_a_ratio_is_the_value_divided_by_the_peers():
    found = figures.figure("a", "b", "s", [1.0, 2.0, 4.0], "peer", [4.0, 4.0])
    assert found.ratio == figures.Spread(0.5, 0.25, 1.0, 3)
    paired = figures.figure("a", "b", "s", [1.0, 2.0], "peer", [2.0, 8.0], paired=True)
    assert paired.ratio == figures.Spread(0.375, 0.25, 0.5, 2)
    assert figures.figure("a", "b", "s", [1.0], "peer", []).ratio is None


def test_what_was_written_is_what_is_read(tmp_path: Path):
    found = result(figures.figure("a", "b", "s", [1.0, 2.0], "peer", [2.0, 2.0]), figures.figure("c", "d", "", [3.0]))
    figures.write(tmp_path / "new/a.json", found)
    assert figures.read(tmp_path / "new/a.json") == found
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_figures_of_one_name_and_figures_of_nothing_are_refused(tmp_path: Path):
    one = figures.figure("a", "b", "s", [1.0])
    with pytest.raises(ValueError, match="same name"):
        result(one, one)
    with pytest.raises(ValueError, match="no value"):
        figures.figure("a", "b", "s", [])
    (tmp_path / "old.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(ValueError, match="run the benchmark again"):
        figures.read(tmp_path / "old.json")


def test_the_page_has_every_figure_with_its_spread_and_where_it_is_from():
    text = pages.page([result(figures.figure("kill/torchrun", "a | b", "s", [0.2, 0.3, 0.7], "torchrun", [3.0, 6.0]))])
    assert "| a \\| b | 0.300 (0.200–0.700) s | torchrun | 4.50 (3.00–6.00) s | **0.0667** (0.0444–0.156) | 3 |" in text
    assert "What it means." in text and "`python benchmarks/recovery.py --kills 3`" in text and "peer 1.2" in text
    assert f"commit {figures.commit()}" in text and "cores: " in text


def test_the_comparison_says_never_and_not_measured():
    never = figures.figure("stop/torchrun", "stopped", "s", [1.5], "torchrun", note="does not notice it")
    killed = figures.figure("kill/torchrun", "killed", "s", [0.2, 0.3, 0.7], "torchrun", [3.0, 6.0])
    lines = pages.comparison([result(never, killed)]).splitlines()
    kill, stop = (next(line for line in lines if word in line) for word in ("kill -9", "kill -STOP"))
    assert kill.endswith("| 0.300 s | 4.50 s (15.00×) | not measured |")
    assert stop.endswith("| 1.50 s | never | not measured |")
    assert pages.comparison([]).count("not measured") >= len(pages.ROWS)


def test_the_comparison_names_the_versions_of_what_stands_beside_once():
    killed = figures.figure("kill/nvrx", "killed", "s", [0.2], "nvrx", [3.0])
    versions = {"python": "3.11.7", "torch": "2.13.0", "nvidia-resiliency-ext": "0.4.1"}
    results = [replace(result(killed), versions=versions), replace(result(benchmark="start"), versions={"torch": "2.13.0"})]
    assert "on one machine with torch 2.13.0, NVRx 0.4.1 (" in pages.comparison(results)
    assert "on one machine (" in pages.comparison([replace(result(killed), versions={})])


def test_only_what_stands_between_the_markers_changes():
    assert pages.put(README, "new") == README.replace("old", "new")
    assert pages.put(pages.put(README, "new"), "new") == pages.put(README, "new")
    with pytest.raises(ValueError, match="figures"):
        pages.put("no place", "new")


def test_a_script_that_fails_is_told_of_and_the_next_one_runs(tmp_path: Path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("all.py", "pages.py", "figures.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder)
    (folder / "start.py").write_text("raise SystemExit('/some/place/of/mine broke')\n")
    (folder / "recovery.py").write_text(FINDS)
    (folder / "nodes.py").write_text(FINDS + "raise SystemExit(3)\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(README)
    command = [sys.executable, "benchmarks/all.py", "start", "recovery", "nodes"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    page = (tmp_path / "docs/benchmarks.md").read_text()
    assert "mine broke" in page and "/some/place" not in page
    assert page.count("**This benchmark did not end well:**") == 2 and page.count("| killed |") == 2
    assert "0.300 s | 4.50 s (15.00×)" in (tmp_path / "README.md").read_text()
    again = subprocess.run([*command[:2], "--render"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert again.returncode == 0 and (tmp_path / "docs/benchmarks.md").read_text() == page


def test_a_script_that_takes_too_long_ends_what_it_has_started(tmp_path: Path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("all.py", "pages.py", "figures.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder)
    (folder / "start.py").write_text(STARTS)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(README)
    command = [sys.executable, "benchmarks/all.py", "start", "--limit-min", "0.1"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "it took longer than 0.1 min" in (tmp_path / "docs/benchmarks.md").read_text()
    assert not psutil.pid_exists(int((tmp_path / "started").read_text()))


def test_figures_of_a_gpu_are_shown_as_they_are_kept_whatever_else_is_run(tmp_path: Path):
    folder = tmp_path / "benchmarks"
    kept = folder / "results/gpu.json"
    for name in ("all.py", "pages.py", "figures.py"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / name, folder)
    (folder / "start.py").write_text(FINDS)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(README)
    found = result(figures.figure("plain/speed", "plain: speed", "tokens/s", [5.0], note="a note"), benchmark="gpu")
    figures.write(kept, figures.replace(found, machine={"GPU": "NVIDIA H100"}, date="2026-01-02"))
    before = kept.read_bytes()
    done = subprocess.run([sys.executable, "benchmarks/all.py", "start"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs/benchmarks.md").read_text()
    assert kept.read_bytes() == before
    assert "| plain: speed | 5.00 tokens/s |  |  | a note |" in page
    section = page[page.index("## One GPU") :]
    assert "GPU: NVIDIA H100" in section and "2026-01-02" in section and page.index("## start") < page.index("## One GPU")


def test_what_the_checkout_says_is_what_its_results_say():
    results = [figures.read(path) for path in sorted((ROOT / "benchmarks/results").glob("*.json"))]
    on_a_gpu = [each for each in results if each.benchmark == "gpu"]
    results = [each for each in results if each.benchmark != "gpu"]
    page, readme = (ROOT / "docs/benchmarks.md").read_text(), (ROOT / "README.md").read_text()
    assert pages.put(readme, pages.comparison(results)) == readme
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == {each.benchmark for each in results}
    for each in results:
        assert all(pages._row(figure) in page for figure in each.figures)
    assert ("## One GPU" in page) == bool(on_a_gpu)
    assert all(pages._row_of_gpu(figure) in page for each in on_a_gpu for figure in each.figures)
