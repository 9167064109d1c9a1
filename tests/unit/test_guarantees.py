"""What docs/testing.md says: every guarantee has a test that exists, in the tier that is written; tests inject every fault."""

import ast
from pathlib import Path

import pytest
from guarantees import BENCHMARK, PAGE, ROOT, rows, tier

from chaos import faults


def test_every_guarantee_has_a_test_that_exists():
    found = rows(PAGE.read_text())
    assert len(found) > 100
    assert not [(row.number, row.test) for row in found if tier(row.test) is None]
    held: dict[str, list[str]] = {}
    guarantee = ""
    for row in found:
        guarantee = row.guarantee or guarantee
        held.setdefault(guarantee, []).append(row.tier)
    # What a benchmark measures, a test runs small.
    assert not [guarantee for guarantee, tiers in held.items() if not guarantee or set(tiers) == {BENCHMARK}]


def test_the_tiers_are_those_of_the_tests_marks():
    wrong = [(row.number, row.test, row.tier, tier(row.test)) for row in rows(PAGE.read_text()) if row.tier != tier(row.test)]
    assert not wrong, f"python {Path('tests/guarantees.py')} writes them"


def test_a_guarantee_stands_in_the_table_once():
    names = [row.guarantee for row in rows(PAGE.read_text()) if row.guarantee]
    assert not [name for name in set(names) if names.count(name) > 1]


PARAM = "pytest.param(2, marks=pytest.mark.soak)"
GENERATE = f"def pytest_generate_tests(metafunc):\n    metafunc.parametrize('n', [{PARAM}])\n"
SOURCES = {
    "def test_it(): ...": "first",
    "@pytest.mark.soak\ndef test_it(): ...": "soak",
    "@pytest.mark.timeout(9)\n@pytest.mark.soak()\ndef test_it(): ...": "soak",
    "pytestmark = pytest.mark.soak\ndef test_it(): ...": "soak",
    "pytestmark = [pytest.mark.timeout(9), pytest.mark.soak]\ndef test_it(): ...": "soak",
    "LONG = pytest.mark.soak\n@LONG\ndef test_it(): ...": "soak",
    "@pytest.mark.soak\ndef test_other(): ...\ndef test_it(): ...": "first",
    f"@pytest.mark.parametrize('n', [1, {PARAM}])\ndef test_it(n): ...": "first, soak",
    f"CASES = [1, {PARAM}]\n@pytest.mark.parametrize('n', CASES)\ndef test_it(n): ...": "first, soak",
    f"{GENERATE}def test_it(n): ...": "first, soak",
    "from soak import soaked\n@pytest.mark.parametrize('n', [1, soaked(2)])\ndef test_it(n): ...": "first, soak",
    f"{GENERATE}def test_it(m): ...": "first",
    "def test_it(tmp_path, rounds): ...": "first, soak",
    "def test_other(): ...": None,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_tier_is_read_from_the_marks(tmp_path: Path, source: str):
    (tmp_path / "test_some.py").write_text(source)
    assert tier("test_some.py::test_it", tmp_path) == SOURCES[source]


def test_a_test_without_a_file_is_none(tmp_path: Path):
    assert tier("test_some.py::test_it", tmp_path) is None


def test_every_fault_is_injected_by_a_test():
    """By its name, in a test that runs campaigns, on this machine or on hosts of the lab."""
    told: set[object] = set()
    for folder in ("integration", "lab"):
        for path in (ROOT / "tests" / folder).glob("test_*.py"):
            told |= {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
    assert len(faults.names()) > 40
    assert not [name for name in faults.names() if name not in told]
