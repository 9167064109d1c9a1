"""A Slurm whose commands are real processes, and whose queue is a file; a chain on it."""

import asyncio
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from srun_steps import Steps

from resilient.config import Config, load
from resilient.slurm.succession import Succession

SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class Slurm:
    """The queue as a test sees it and sets it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.set([])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No command runs meanwhile: each writes the queue back as it has read it."""
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def set(self, jobs: list[dict[str, Any]]) -> None:
        with self._alone():
            self._write(jobs)

    def _write(self, jobs: list[dict[str, Any]]) -> None:
        (self.directory / "queue.json").write_text(json.dumps(jobs))

    def jobs(self, *states: str) -> list[dict[str, Any]]:
        with self._alone():
            found = self._read()
        return [job for job in found if not states or job["state"] in states]

    def _read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.directory / "queue.json").read_text())
        return found

    def becomes(self, job_id: str, **fields: str) -> None:
        with self._alone():
            self._write([job | fields if job["id"] == job_id else job for job in self._read()])

    def deaf(self, calls: int, complaint: str = SILENT) -> None:
        """So many calls fail, with these words."""
        with self._alone():
            (self.directory / "complaint").write_text(complaint)
            (self.directory / "deaf").write_text(str(calls))

    def reserved(self, lines: list[str]) -> None:
        """What `scontrol --oneliner show reservation` answers."""
        (self.directory / "reservations").write_text("\n".join(lines) + "\n")

    def preempts(self, kind: str, cluster: str, partition: str, qos: str) -> None:
        """PreemptType, and PreemptMode of the cluster, of its partitions and of its QOS."""
        (self.directory / "preemption").write_text(f"{kind} {cluster} {partition} {qos}")

    def lossy(self) -> None:
        (self.directory / "lossy").touch()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    state, programs = tmp_path / "slurm", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    fake = (Path(__file__).parents[2] / "fake_slurm.py").read_text()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sacctmgr"):
        (programs / name).write_text(f"#!{sys.executable} -S\n{fake}")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(state))
    return Slurm(state)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"name": "gpt", "run_dir": str(tmp_path / "run")}))
    return path


@pytest.fixture
def config(path: Path) -> Config:
    return load(path, [])


@pytest.fixture
def going(config: Config, slurm) -> Succession:
    """A chain whose first job runs."""
    found = Succession.of(config)
    asyncio.run(found.begin(f"#!/bin/bash\n#SBATCH --job-name={found.name}\n"))
    slurm.becomes("100", state="RUNNING", end="2099-01-01T00:00:00")
    assert found.started("100", 0) is None
    return found


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps of Slurm whose srun is a process of this machine."""
    return Steps(tmp_path, monkeypatch)
