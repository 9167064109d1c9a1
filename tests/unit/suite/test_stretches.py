"""Tests that run in several processes are dealt out so that some wait while others compute, and each runs once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from order import stretches

ROOT = Path(__file__).parents[3]
FILES = st.lists(st.integers(1, 9), max_size=12)


@given(FILES, FILES, st.integers(0, 300), st.integers(2, 9))
def test_each_test_is_in_one_stretch_and_files_stay_together(jobs: list[int], campaigns: list[int], others: int, count: int):
    by_file = [
        [(kind, file, n) for n in range(size)] for kind, sizes in enumerate((jobs, campaigns)) for file, size in enumerate(sizes)
    ]
    rest = [(2, 0, n) for n in range(others)]
    found = stretches(by_file[: len(jobs)], by_file[len(jobs) :], rest, count)
    assert len(found) == count
    assert sorted(each for stretch in found for each in stretch) == sorted([*(each for file in by_file for each in file), *rest])
    for number, stretch in enumerate(found):
        kinds = [kind for kind, _, _ in stretch]
        assert set(kinds) <= {number % 2, 2} and kinds == sorted(kinds)
    for file in by_file:
        assert sum(file[0] in stretch for stretch in found) == 1 == sum(set(file) <= set(stretch) for stretch in found)
    length = -(-sum(map(len, found)) // count)
    assert all(len(stretch) <= length or not {2} & {kind for kind, _, _ in stretch} for stretch in found)


@pytest.mark.soak
def test_processes_begin_with_jobs_and_with_campaigns(tmp_path: Path):
    for folder in ("unit", "integration", "lab"):
        for name in ("a", "b"):
            path = tmp_path / "tests" / folder / f"test_{folder}_{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n, worker_id): print('in', worker_id)\n"
            )
    plugins = [word for name in ("order", "no:cacheprovider") for word in ("-p", name)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *plugins,
        "-n2",
        "--dist",
        "worksteal",
        "-v",
        "-rA",
        "--rootdir",
        str(tmp_path),
        "tests",
    ]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    for name in ("PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        environ.pop(name, None)
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "24 passed" in done.stdout, done.stdout
    ran = [line.split() for line in done.stdout.splitlines() if line.startswith("[gw")]
    first = {next(words[-1] for words in ran if words[0] == worker).split("/")[1] for worker in ("[gw0]", "[gw1]")}
    assert first == {"lab", "integration"}, ran
