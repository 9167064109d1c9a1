"""The slices of the second tier."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import soak
from nested_pytest import run

TESTS = """
import pytest

def test_first(): pass

@pytest.mark.soak
@pytest.mark.parametrize("number", range(9))
def test_long(number): pass
"""
COSTS_S = {f"test_{number}": 10.0 + 7 * number for number in range(20)}


@pytest.mark.parametrize(
    ("costs_s", "budget_s", "sizes"),
    [
        ({}, 60.0, []),
        ({"a": 10.0}, 60.0, [1]),
        ({"a": 90.0}, 60.0, [1]),  # alone, since it cannot be made shorter
        ({"a": 90.0, "b": 20.0, "c": 20.0}, 60.0, [1, 2]),
        ({"a": 30.0, "b": 30.0, "c": 30.0}, 60.0, [1, 2]),
        (dict.fromkeys("abcd", 60.0), 60.0, [1, 1, 1, 1]),
    ],
)
def test_a_slice_takes_no_longer_than_the_budget(costs_s: dict[str, float], budget_s: float, sizes: list[int]):
    parts = soak.slices(costs_s, budget_s)
    assert sorted(len(part) for part in parts) == sizes
    assert all(sum(costs_s[test] for test in part) <= budget_s or len(part) == 1 for part in parts)


def test_the_slices_hold_every_test_once_and_do_not_depend_on_the_order_of_collection():
    parts = soak.slices(COSTS_S, 200.0)
    assert sorted(test for part in parts for test in part) == sorted(COSTS_S)
    assert soak.slices(dict(reversed(COSTS_S.items())), 200.0) == parts


def test_over_many_commits_every_slice_has_its_turn_about_as_often():
    turns = [soak.chosen(12, f"commit {number}") for number in range(1200)]
    assert all(60 < turns.count(number) < 140 for number in range(12))
    assert any(one != other for one, other in pairwise(turns))


@pytest.mark.parametrize("options", [(), soak.soaked(("-n", "2"))], ids=["one process", "xdist"])
def test_a_slice_is_printed_with_its_tests_and_can_be_run_again(tmp_path: Path, options: tuple[str, ...]):
    words = ["-m", "soak", "--soak-budget-s", str(3 * soak.UNKNOWN_S), "--costs-to", str(tmp_path / "costs"), *options]
    found = []
    for seed in ("one commit", "one commit", "another"):
        code, output = run(tmp_path, TESTS, *words, "--soak-slice", seed)
        assert code == 0, output
        ran = [json.loads(line)["name"] for line in (tmp_path / "costs").read_text().splitlines()]
        assert len(ran) == 3
        assert f"--soak-slice {shlex.quote(seed)}" in output
        assert all(name in output[: output.index("processor time")] for name in ran)
        found.append(sorted(ran))
    assert found[0] == found[1]
    assert any(each != found[0] for each in found)


def test_without_a_seed_the_whole_of_the_tier_that_is_asked_for_runs(tmp_path: Path):
    assert "9 passed, 1 deselected" in run(tmp_path, TESTS, "-m", "soak")[1]
    assert "1 passed, 9 deselected" in run(tmp_path, TESTS, "-m", "not soak")[1]
