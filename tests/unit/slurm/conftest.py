"""A Slurm whose commands are real processes, and whose queue is a file."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest


class Slurm:
    """The queue as a test sees it and sets it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.set([])

    def set(self, jobs: list[dict[str, Any]]) -> None:
        (self.directory / "queue.json").write_text(json.dumps(jobs))

    def jobs(self, *states: str) -> list[dict[str, Any]]:
        found = json.loads((self.directory / "queue.json").read_text())
        return [job for job in found if not states or job["state"] in states]

    def becomes(self, job_id: str, **fields: str) -> None:
        self.set([job | fields if job["id"] == job_id else job for job in self.jobs()])

    def deaf(self, calls: int) -> None:
        (self.directory / "deaf").write_text(str(calls))

    def reserved(self, lines: list[str]) -> None:
        """What `scontrol --oneliner show reservation` answers."""
        (self.directory / "reservations").write_text("\n".join(lines) + "\n")

    def lossy(self) -> None:
        (self.directory / "lossy").touch()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    state, programs = tmp_path / "slurm", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    fake = (Path(__file__).parents[2] / "fake_slurm.py").read_text()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        (programs / name).write_text(f"#!{sys.executable} -S\n{fake}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    return Slurm(state)
