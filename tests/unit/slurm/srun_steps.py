"""A launcher whose srun is a process of this machine, which says how it was called and does what it is told."""

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resilient.driver.launch import AgentCommand
from resilient.slurm import roster
from resilient.slurm.allocation import Allocation
from resilient.slurm.launch import SlurmLauncher
from resilient.slurm.roster import Seat

JOB = Allocation("77", ("n2", "n1", "n3", "n7"), (48, 48, 48, 48), 0)


SRUN = f"""#!{sys.executable}
import json, os, sys, time
with open("CALLS", "a") as calls:
    os.getcwd()
    calls.write(json.dumps([sys.argv[1:], dict(os.environ), os.getpid()]) + "\\n")
exec(open("DOES").read())
"""


STAYS = "time.sleep(600)"


ENDS = "pass"


class Steps:
    """A launcher whose srun is a process of this machine."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        (directory / "srun").write_text(SRUN.replace("CALLS", f"{directory}/calls").replace("DOES", f"{directory}/does"))
        (directory / "srun").chmod(0o755)
        (directory / "logs").mkdir()
        monkeypatch.setenv("PATH", str(directory))
        self.ended: list[tuple[int, int, str]] = []
        self.does(STAYS)

    def does(self, code: str) -> None:
        (self.directory / "does").write_text(code)

    def launcher(self, allocation: Allocation = JOB, **options: Any) -> SlurmLauncher:
        environ = {"OMP_NUM_THREADS": "12"}
        command = AgentCommand(
            "n2:80", 4, self.directory, "x", "trainer.main:train", 30.0, 30.0, 16, "cpu", "t0ken", environ, "INFO"
        )
        return SlurmLauncher(command, lambda *news: self.ended.append(news), allocation=allocation, **options)

    def calls(self) -> list[tuple[list[str], dict[str, str], int]]:
        path = self.directory / "calls"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]

    async def called(self, times: int) -> list[tuple[list[str], dict[str, str], int]]:
        await until(lambda: len(self.calls()) >= times)
        return self.calls()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(120.0):
        while not what():
            await asyncio.sleep(0.01)


def options_of(words: list[str]) -> dict[str, str]:
    return dict(itertools.pairwise(words[: words.index("-m")]))


def seats_of(environ: dict[str, str]) -> dict[str, Seat]:
    return roster.read(environ["RESILIENT_ROSTER"])
