"""An agent ends the one that its node had before, and no other process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resilient.agent.predecessor import end_predecessors

AGENT = """
import sys
from resilient.agent import NAME
from resilient.lifeline import name_process
name_process(sys.argv[3])
print(flush=True)
sys.stdin.read()
"""
Make = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Make]:
    """A process whose command line is an agent's."""
    made: list[subprocess.Popen[bytes]] = []

    def make(run_dir: Path, *, host: str, name: str = "agent") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", AGENT, "--run-dir", str(run_dir), name, "resilient.agent"]
        environ = {"SLURMD_NODENAME": host, "PYTHONPATH": ":".join(sys.path)}
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline()
        return made[-1]

    yield make
    for each in made:
        each.kill()
        each.communicate()


def test_the_agent_before_this_one_is_killed_and_nobody_else(process: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    before = process(tmp_path, host="n1")
    others = [
        process(tmp_path / "other", host="n1"),  # of another run
        process(tmp_path, host="n2"),  # where several hosts are one machine
        process(tmp_path, host="n1", name="template"),
    ]
    assert end_predecessors(tmp_path) == [before.pid]
    assert before.poll() == -9
    assert [each.poll() for each in others] == [None] * 3
    assert end_predecessors(tmp_path) == []
