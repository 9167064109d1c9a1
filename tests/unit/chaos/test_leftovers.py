"""Processes that are left, and those of somebody who looks on."""

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from chaos.verdict import leftovers


@pytest.mark.parametrize("at_terminal", [True, False])
def test_who_looks_on_from_another_terminal_is_not_left_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_terminal: bool):
    monkeypatch.setattr(leftovers, "PATIENCE_S", 0.0)
    path = tmp_path / "events.jsonl"
    path.touch()
    master, slave = os.openpty()
    session = ["setsid", "--ctty"] if at_terminal else ["setsid"]
    process = subprocess.Popen([*session, "tail", "-f", str(path)], stdin=slave, stdout=slave)
    try:
        while psutil.Process(process.pid).name() != "tail":
            time.sleep(0.01)
        assert leftovers.processes(tmp_path) == ([] if at_terminal else [f"process {process.pid} (tail)"])
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
