"""What several processes of the tests share is made once, by the first that asks; one that fails leaves nothing half made."""

from pathlib import Path

import pytest
from nested_pytest import run
from soak import soaked

TESTS = """
import time
from pathlib import Path
import pytest
from shared import once
COUNT = Path(__file__).with_name("count")

def make(directory):
    assert not list(directory.iterdir())
    (directory / "half").touch()
    before = len(COUNT.read_text()) if COUNT.exists() else 0
    COUNT.write_text("x" * (before + 1))
    time.sleep(0.5)  # in which the others ask, too
    assert before, "for the test"
    (directory / "half").rename(directory / "whole")

@pytest.mark.parametrize("number", range(4))
def test_all_find_the_same(tmp_path_factory, number):
    assert [path.name for path in once(tmp_path_factory, "data", make).iterdir()] == ["whole"]
"""


@pytest.mark.parametrize("workers", ["2", soaked("0")])
def test_it_is_made_until_it_was_made_once(tmp_path: Path, workers: str):
    status, output = run(tmp_path, TESTS, "-n", workers, "--dist", "worksteal")
    assert status == 1
    assert "1 failed, 3 passed" in output, output
    assert (tmp_path / "count").read_text() == "xx"
