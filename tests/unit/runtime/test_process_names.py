"""The kernel cuts the name of a process after 15 bytes, and a path of a mount is bytes: neither need be text in UTF-8."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mounts import needs_root

from chaos.lab import host
from resilient import pid_namespace
from resilient.agent import inspection, predecessor
from resilient.bench import running
from resilient.health import bounded
from resilient.lifeline import name_of

NAMED = """
import sys
from resilient.lifeline import name_process
name_process("é" * 8)
print(flush=True)
sys.stdin.read()
"""
ELSEWHERE = 1  # the inode of no PID namespace
NOBODY = (1 << 22) + 1  # above every process id


@pytest.fixture
def named() -> Iterator[int]:
    """A process whose name ends within a character."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", NAMED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"\n"
        while inspection.state_of(process.pid) == "R":
            pass
        yield process.pid
        process.stdin.close()


@pytest.mark.parametrize(
    ("read", "found"),
    [
        (inspection.state_of, "S"),
        (inspection.failure_of, None),
        (lambda pid: inspection.bears(pid, inspection.STACKS_SIGNAL), False),
        (name_of, "é" * 7 + "\N{REPLACEMENT CHARACTER}"),
        (lambda pid: bounded._doing(pid).split()[0], "waiting"),
        (running._there, True),
        (host._ids, lambda pid: [pid]),
        (lambda _: list(predecessor.predecessors(Path("/a run of nobody"))), []),
        (lambda _: pid_namespace.translated(NOBODY, ELSEWHERE), None),
    ],
    ids=["state", "failure", "signals", "name", "what it does", "whether it is there", "ids", "predecessors", "namespace"],
)
def test_of_a_process_whose_name_ends_within_a_character_all_is_read(named: int, read: Callable[[int], object], found: object):
    assert read(named) == (found(named) if callable(found) else found)


MOUNTED = """
import os, subprocess, sys
from pathlib import Path
from chaos.primitives import mounts
from chaos.verdict import machine
from resilient.agent.oom import OomWatch
odd = os.fsencode(sys.argv[1]) + b"/caf\\xe9"
os.mkdir(odd)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", odd], check=True)
OomWatch().poll([os.getpid()])
assert mounts.mounted(Path(os.fsdecode(odd)))
assert any("tmpfs" in line for line in machine.inspect([Path(os.fsdecode(odd))])["mount"])
"""


@needs_root
def test_a_mount_point_whose_path_is_no_utf_8_keeps_nobody_from_reading_the_others(tmp_path: Path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "--mount", sys.executable, "-c", MOUNTED, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
