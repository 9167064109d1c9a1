"""Experiments as commands: started, read, and whatever comes of them found."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml
from campaigns import ROOT, wait_for

TRACE = "RESILIENT_TEST_TRACE"  # in the environment of all that comes of a command of these tests


class Chaos:
    """One `resilient chaos run` and what comes of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.out = directory / "out"
        self.trace = f"{os.getpid()}-{random.randrange(1 << 60)}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, experiment: dict[str, Any] | str, *options: str) -> "Chaos":
        """Of these keys, or one that is shipped, by its name."""
        path = experiment
        if not isinstance(experiment, str):
            path = self.directory / "experiment.yaml"
            path.write_text(yaml.safe_dump({"name": "test", "limits": {"minutes": 20}, "steady_steps": 5, **experiment}))
        paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chaos", "run", str(path), "--out", str(self.out), *options],
            env={**os.environ, "PYTHONPATH": paths, TRACE: self.trace},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=(self.directory / "errors").open("w"),
            text=True,
            start_new_session=True,
        )
        return self

    def run(self, experiment: dict[str, Any] | str, *options: str, patience_s: float = 1200.0) -> int:
        """Its exit code; what it has printed is in `printed` then."""
        self.start(experiment, *options)
        assert self.process is not None
        self.printed, _ = self.process.communicate(timeout=patience_s)
        return self.process.returncode

    def said(self) -> str:
        return (self.directory / "errors").read_text()

    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "verdict.json").read_text())
        return found

    def all_of_it(self) -> list[psutil.Process]:
        """Whatever this command has started and is there still."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(TRACE) == self.trace and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def commands(directory: Path) -> Iterator[Chaos]:
    """One, and at its end nothing of it is left."""
    made = Chaos(directory)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()
    wait_for(lambda: not made.all_of_it(), f"processes left behind: {made.all_of_it()}")
