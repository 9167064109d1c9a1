"""What the agent finds out about its workers' processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilient.agent import looks

WORKER = """
import sys, time
from pathlib import Path
from resilient.agent.looks import answer_with_stacks
answer_with_stacks(Path(sys.argv[1]))
print("ready", flush=True)
def here():
    while sys.argv[2] == "spin":
        pass
    time.sleep(60)
here()
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[[str], tuple[int, Path]]]:
    """A process that answers: its id, and where."""
    started: list[subprocess.Popen[bytes]] = []

    def start(how: str) -> tuple[int, Path]:
        path = tmp_path / f"stacks{len(started)}"
        started.append(subprocess.Popen([sys.executable, "-c", WORKER, str(path), how], stdout=subprocess.PIPE))
        out = started[-1].stdout
        assert out is not None and out.readline() == b"ready\n"
        time.sleep(0.2)
        return started[-1].pid, path

    yield start
    for each in started:
        each.kill()
        each.wait()
        if each.stdout is not None:
            each.stdout.close()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while looks.state_of(pid) != "T":
        time.sleep(0.01)


@pytest.mark.parametrize(("how", "state", "busy"), [("sleep", "S", False), ("spin", "R", True)])
def test_a_look_at_a_real_process(worker: Callable[[str], tuple[int, Path]], how: str, state: str, busy: bool):
    mine = worker(how)
    for _ in range(2):  # what was written before is not told again
        found = looks.look({3: mine})[3]
        assert found.stacks.count("in here") == 1
        assert (found.state, found.cpu > 0.5) == (state, busy)


def test_a_stopped_process_says_where_it_was_unless_all_are_stopped(worker: Callable[[str], tuple[int, Path]]):
    one, other = worker("sleep"), worker("sleep")
    stop(one[0])
    found = looks.look({0: one, 1: other})
    assert (found[0].state, found[1].state) == ("T", "S")
    assert "in here" in found[0].stacks
    for pid, _ in (one, other):
        stop(pid)
    found = looks.look({0: one, 1: other})
    assert [look.state for look in found.values()] == ["T", "T"]
    assert looks.state_of(one[0]) == "T"  # it is left as it is


def test_a_look_at_nobody(tmp_path: Path):
    process = subprocess.Popen(["true"])
    process.wait()
    assert looks.look({3: (process.pid, tmp_path / "none")}) == {3: looks.Look("", 0.0, "")}
