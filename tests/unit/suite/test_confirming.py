"""What fails beside other tests is run again by itself: only what never fails there lets the run pass, and it is told."""

from pathlib import Path

import pytest
from nested_pytest import run
from soak import soaked

TESTS = """
from pathlib import Path
COUNT = Path(__file__).with_name("count")

def test_sound(): pass

def test_that_fails():
    before = len(COUNT.read_text()) if COUNT.exists() else 0
    COUNT.write_text("x" * (before + 1))
    assert before not in {failing}, "for the test"
"""


@pytest.mark.parametrize("workers", ["2", soaked("0")])
def test_a_failure_that_never_comes_again_is_told_and_does_not_fail_the_run(tmp_path: Path, workers: str):
    status, output = run(tmp_path, TESTS.format(failing={0}), "--confirm-failures", "2", "-n", workers)
    assert (tmp_path / "count").read_text() == "xxx"
    assert status == 0, output
    assert "FLAKY test_it.py::test_that_fails failed beside other tests and passed 2 of 2 by itself" in output


@pytest.mark.parametrize("failing", [{0, 1, 2, 3}, soaked({0, 3})], ids=str)
def test_a_failure_that_comes_again_fails_the_run_and_shows_it(tmp_path: Path, failing: set[int]):
    status, output = run(tmp_path, TESTS.format(failing=failing), "--confirm-failures", "3")
    assert status == 1
    assert (tmp_path / "count").read_text() == "x" * (2 if 1 in failing else 4)
    assert output.count("def test_that_fails") == 2, output
    assert "FLAKY" not in output


@pytest.mark.soak
def test_without_the_option_nothing_is_run_again(tmp_path: Path):
    status, _ = run(tmp_path, TESTS.format(failing={0}))
    assert (status, (tmp_path / "count").read_text()) == (1, "x")


def test_many_failures_are_no_accident(tmp_path: Path):
    tests = "\n".join(f"def test_{number}(): assert False" for number in range(3))
    status, output = run(tmp_path, tests, "--confirm-failures", "3")
    assert status == 1
    assert "by itself" not in output


@pytest.mark.soak
def test_a_test_that_is_too_dear_fails_the_run_all_the_same(tmp_path: Path):
    tests = TESTS.format(failing={0}) + "\nimport time\n\ndef test_dear():\n    while time.process_time() < 3: pass\n"
    status, output = run(tmp_path, tests, "--confirm-failures", "1", "--cost-limit-s", "0.1")
    assert status == 1, output
    assert "FLAKY" in output and "test_dear took" in output
