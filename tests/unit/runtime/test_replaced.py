"""Ranks whose script replaces their process by another program."""

import subprocess
import sys
from pathlib import Path

import pytest

BECOMES = """
import os
from resilient.script import replaced

replaced.watch()
if os.fork() == 0:
    os.execvp("echo", ["echo", "a child"])
os.wait()
{call}
"""


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ('os.execv("/bin/echo", ["echo", "it runs"])', "execv"),
        ('os.execve("/bin/echo", ["echo", "it runs"], env={})', "execve"),
        ('os.execlp("echo", "echo", "it runs")', "execv"),
    ],
)
def test_a_rank_that_is_replaced_says_so_once_and_the_program_runs(tmp_path: Path, call: str, name: str):
    script = tmp_path / "becomes.py"
    script.write_text(BECOMES.format(call=call))
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    assert done.stdout == "a child\nit runs\n"
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"{script}:9 replaces the process of this rank by ") and f"/echo (os.{name})" in told
    assert "Better give `resilient run` that program" in told
