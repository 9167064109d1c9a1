"""The console command `trainer`, as a process: it ends and complains as `resilient trainer`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMANDS = {"trainer": "-c 'from trainer.cli import main; main()'", "resilient trainer": "-m resilient trainer"}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        ("--help > /dev/full", 69, "resilient: No space left on device\n"),
        ("evaluate -h >&-", 0, ""),
        ("generate -h | tr '\\n' ' ' | grep -q '{CHECKPOINT|RUN_DIR} *{PROMPT}'", 0, ""),
        ("export -h | tr '\\n' ' ' | grep -q '{CHECKPOINT|RUN_DIR} *{OUTPUT}'", 0, ""),
    ],
    ids=["a full disk", "a closed output", "generate", "export"],
)
def test_the_trainers_own_command_ends_as_the_runtimes_group_of_commands(
    tmp_path: Path, command: str, words: str, code: int, complaint: str
):
    line = f"{sys.executable} {COMMANDS[command]} {words}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, complaint)
