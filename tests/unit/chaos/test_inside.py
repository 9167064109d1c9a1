"""Orders to ranks: each is carried out at most once, by whom it was given to, and an injector knows of its own ones alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.faults.worker_raise import InjectedError
from chaos.injectors import inside
from chaos.injectors.context import Target
from chaos.injectors.injector import InjectionRequest
from resilient import worker
from resilient.config import dump, load

NO_ROOM = """
import resource, signal, sys
from pathlib import Path
from chaos.injectors import inside
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    inside.withdraw(Path(sys.argv[1]), "one")
except OSError:
    print("no room")
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a campaign that allows faults, and runs nowhere."""
    path = tmp_path / "config.yaml"
    path.write_text(f"run_dir: {tmp_path}\ncluster: {{device: cpu, procs_per_node: 1}}\nchaos: {{allow: true}}\n")
    path.write_text(dump(load(path, [])))
    return tmp_path


def order_given(run_dir: Path) -> subprocess.Popen[str]:
    """An injector that has a rank raise an exception; its input is open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "chaos.injectors.injector"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(InjectionRequest("1-worker_raise", "worker_raise", run_dir, Target(rank=0)).line())
    process.stdin.flush()
    return process


def answers(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """All of an injector whose input ends now."""
    printed, _ = process.communicate(timeout=60)
    return [json.loads(line) for line in printed.splitlines()]


def test_what_could_not_be_marked_can_still_be_taken_back(tmp_path: Path):
    inside.give(tmp_path, inside.Order("one", "worker_raise", 0))
    done = subprocess.run([sys.executable, "-c", NO_ROOM, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "no room\n"
    assert inside.withdraw(tmp_path, "one")
    assert not inside.withdraw(tmp_path, "one")
    assert [path.name for path in (tmp_path / inside.DIRECTORY).iterdir()] == ["one.taken"]


def test_an_order_that_was_taken_back_is_given_again_and_one_that_was_carried_out_is_not_told_of_twice(run_dir: Path):
    for _ in range(2):
        *_, last = answers(order_given(run_dir))
        assert last == last | {"what": "failed", "reason": "rank 0 did not come to step any"}
    injector = order_given(run_dir)
    rank = inside._OrderWatcher(worker.Context(0, 0, 1, 1, 1, run_dir, supervised=True), run_dir / inside.DIRECTORY)
    with pytest.raises(InjectedError):
        while injector.poll() is None:
            rank(None, 4)
            rank("step", 5)
    assert [answer["what"] for answer in answers(injector)] == ["armed", "injected", "undone"]
    *_, last = answers(order_given(run_dir))
    assert last["what"] == "failed"
