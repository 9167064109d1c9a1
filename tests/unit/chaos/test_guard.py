"""The guard: undoes in the reverse order, whoever ends, and takes no command that it would cut."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.injectors.guard import Guard

OWNER = """
import sys, time
from chaos.injectors.guard import Guard
guard = Guard()
for name in ("first", "second"):
    guard.add(["sh", "-c", f"echo {name} >> {sys.argv[1]}"])
print("ready", flush=True)
time.sleep(600)
"""


def test_what_was_added_last_is_undone_first(tmp_path: Path):
    with Guard() as guard:
        for name in ("first", "it's second"):
            guard.add(["sh", "-c", f'echo "{name}" >> {tmp_path}/done'])
        assert not (tmp_path / "done").exists()
    assert (tmp_path / "done").read_text() == "it's second\nfirst\n"


def test_all_is_undone_when_the_owner_is_killed(tmp_path: Path):
    done = tmp_path / "done"
    with subprocess.Popen([sys.executable, "-c", OWNER, str(done)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        owner.send_signal(signal.SIGKILL)
        owner.stdout.read()
    deadline = time.monotonic() + 120.0
    while not done.exists() or done.read_text() != "second\nfirst\n":
        assert time.monotonic() < deadline, "nothing was undone"
        time.sleep(0.01)


def test_a_command_of_several_lines_is_refused():
    with Guard() as guard, pytest.raises(ValueError, match="one line"):
        guard.add(["python3", "-c", "print(1)\nprint(2)"])
