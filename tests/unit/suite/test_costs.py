"""What tests cost is counted, shown and limited."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import costs
import pytest
from nested_pytest import run
from soak import soaked

TESTS = """
import multiprocessing, subprocess, sys, time
import pytest

def burn(seconds):
    while time.process_time() < seconds:
        pass

BURN = "import time\\nwhile time.process_time() < 0.5: pass"

def test_cheap(): pass

def test_dear_itself():
    began = time.process_time()
    burn(began + 0.5)

def test_dear_by_a_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_dear_by_a_child_that_lives_on():
    child = subprocess.Popen([sys.executable, "-c", BURN + "\\nprint(flush=True)\\ninput()"], stdin=-1, stdout=-1)
    child.stdout.readline()
    globals()["kept"] = child

def test_dear_by_the_child_of_a_server():
    process = multiprocessing.get_context("forkserver").Process(target=burn, args=(0.5,))
    process.start()
    process.join()

@pytest.mark.soak
def test_dear_and_a_soak():
    began = time.process_time()
    burn(began + 0.5)

@pytest.fixture(scope="module")
def shared():
    began = time.process_time()
    burn(began + 0.5)

def test_first_of_a_shared_fixture(shared): pass
"""
DEAR = {
    "test_dear_itself",
    "test_dear_by_a_child",
    "test_dear_by_a_child_that_lives_on",
    "test_dear_by_the_child_of_a_server",
    "shared",
}


WITHOUT_A_START = "import costs\ncosts._start = lambda: None\n"  # of a process that imports torch, which itself is dear


def named(output: str, severity: str) -> set[str]:
    """Names of the tests that a run calls too dear, with this severity."""
    lines = [line for line in output.splitlines() if line.startswith(severity) and "the first tier allows" in line]
    return {line.split()[1].split("::")[-1] for line in lines}


@pytest.mark.soak
@pytest.mark.parametrize("options", [soaked(()), ("-n", "2")], ids=["one process", "xdist"])
def test_a_test_far_above_the_limit_fails_the_run_and_is_named(tmp_path: Path, options: tuple[str, ...]):
    (tmp_path / "conftest.py").write_text(WITHOUT_A_START)
    code, output = run(tmp_path, TESTS, "--cost-limit-s", "0.1", *options)
    assert code == 1, output
    assert "7 passed" in output
    assert named(output, "FAILED") == DEAR


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), soaked(("-n", "2"))], ids=["one process", "xdist"])
def test_a_test_a_little_above_the_limit_is_named_and_fails_nothing(tmp_path: Path, options: tuple[str, ...]):
    # The processor counts as one of the limit's speed.
    (tmp_path / "conftest.py").write_text(f"{WITHOUT_A_START}costs.WORK_S = 1e9\n")
    tests = TESTS.replace("0.5", "0.8")
    code, output = run(tmp_path, tests, "--cost-limit-s", "0.7", "-k", "itself or shared or cheap", *options)
    assert code == 0, output
    assert named(output, "WARNING") == {"test_dear_itself", "shared"}
    assert not named(output, "FAILED")


@pytest.mark.soak
def test_below_the_limit_the_run_is_good_and_the_dearest_are_shown_and_written(tmp_path: Path):
    code, output = run(tmp_path, TESTS, "--cost-limit-s", "30", "--costs-to", str(tmp_path / "costs"))
    assert code == 0, output
    shown = output[output.index("the dearest") :]
    assert all(name in shown for name in DEAR)
    written = [costs.Cost(**json.loads(line)) for line in (tmp_path / "costs").read_text().splitlines()]
    assert len(written) == 8
    assert [cost.name for cost in written if cost.shared] == ["test_it.py::shared"]
    assert [cost.name for cost in written if cost.soak] == ["test_it.py::test_dear_and_a_soak"]
    assert next(cost for cost in written if cost.name.endswith("first_of_a_shared_fixture")).cpu_s < 0.25


def test_a_failed_run_stays_failed_with_its_own_status(tmp_path: Path):
    assert run(tmp_path, "def test_it(): assert False")[0] == 1
    assert run(tmp_path, "")[0] == 5  # no tests


def test_processes_may_end_while_they_are_counted():
    done = threading.Event()

    def start_others() -> None:
        while not done.is_set():
            os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

    others = [threading.Thread(target=start_others) for _ in range(3)]
    for each in others:
        each.start()
    try:
        assert all(costs.cpu_s() > 0 for _ in range(400))
    finally:
        done.set()
        for each in others:
            each.join()


def test_what_is_shared_inside_something_shared_is_counted_once():
    meter = costs.Meter()
    mark = meter.mark()
    with meter.sharing("outer"):
        with meter.sharing("inner"):
            sum(range(3_000_000))
    (inner, outer), (wall_s, _) = meter.take(), meter.since(mark)
    assert inner.name == "inner"
    assert outer.wall_s < inner.wall_s
    assert wall_s < inner.wall_s
    assert meter.take() == []


def test_the_limit_grows_with_what_a_fixed_piece_of_work_takes():
    cost = costs.Cost("dear", 1, 25.0)
    assert costs.over([cost], 20) == [cost]
    assert costs.over([replace(cost, slowness=1.3)], 20) == []
    assert costs.over([replace(cost, slowness=1.2)], 20) == [replace(cost, slowness=1.2)]


@pytest.mark.parametrize(
    ("work_s", "start_s", "factor"),
    [(0.02, 1.0, 1.0), (0.09, 1.0, 2.0), (0.02, 4.6, 2.0), (0.09, 6.9, 3.0)],
)
def test_a_slow_processor_is_measured_and_a_fast_one_makes_no_limit_smaller(
    monkeypatch: pytest.MonkeyPatch, work_s: float, start_s: float, factor: float
):
    took = {costs._work: work_s, costs._start: start_s}
    monkeypatch.setattr(costs, "_timed", lambda work, clock: took[work])
    monkeypatch.setattr(costs, "_starting", costs._starting.__wrapped__)
    assert costs.slowness() == pytest.approx(factor)


@pytest.mark.soak
def test_the_start_of_a_process_is_timed_by_what_the_process_used():
    assert 0.2 < costs._timed(costs._start, costs._of_children) < 100


def test_the_speed_during_a_test_is_what_counts_of_it(monkeypatch: pytest.MonkeyPatch):
    pace = costs.Pace()
    assert pace.since(0.0) == 1.0
    for t, share in ((1.0, 3.0), (2.0, 1.2), (3.0, 1.6), (4.0, 1.4)):
        monkeypatch.setattr(costs.time, "monotonic", lambda t=t: t)
        monkeypatch.setattr(costs, "_timed", lambda work, clock, share=share: share * costs.WORK_S)
        pace.sample()
    assert (pace.since(2.0), pace.since(5.0)) == (pytest.approx(1.4), 1.0)
