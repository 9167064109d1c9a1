"""Slurm's commands where a site's script stands for them, and the real one is its child."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resilient.slurm import queue
from resilient.slurm.queue import SlurmSilent

PATIENCE_S = 60.0  # far below the 300 s that the real command takes


class Wrapped:
    """A squeue of the site."""

    def __init__(self, directory: Path) -> None:
        self._pid_file = directory / "real.pid"
        self._program = directory / "squeue"

    def write(self, starter: str) -> None:
        real = f"echo $$ > {self._pid_file}.new; mv {self._pid_file}.new {self._pid_file}; exec sleep 300"
        self._program.write_text(f"#!/bin/bash\n{starter} bash -c '{real}'\nexit $?\n")
        self._program.chmod(0o755)

    @property
    def real(self) -> psutil.Process | None:
        """The real command, once it runs."""
        return psutil.Process(int(self._pid_file.read_text())) if self._pid_file.exists() else None


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrapped]:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = Wrapped(tmp_path)
    yield found
    try:
        if (real := found.real) is not None:
            real.kill()
    except psutil.NoSuchProcess:
        pass


@pytest.mark.parametrize("starter", ["", "setsid"], ids=["of its group", "of a session of its own"])
def test_a_call_that_is_given_up_does_not_wait_for_what_a_script_has_started(wrapped: Wrapped, starter: str) -> None:
    wrapped.write(starter)

    async def given_up() -> psutil.Process:
        async with asyncio.timeout(PATIENCE_S):
            asking = asyncio.create_task(queue.job("7", timeout_s=300.0))
            while (real := wrapped.real) is None:
                await asyncio.sleep(0.01)
            asking.cancel()  # as by a SIGTERM
            await asyncio.wait([asking])
            assert asking.cancelled()
            return real

    real = asyncio.run(given_up())
    if not starter:
        real.wait(PATIENCE_S)


def test_the_time_limit_of_a_call_holds_for_what_a_script_has_started(wrapped: Wrapped) -> None:
    wrapped.write("setsid")

    async def asked() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await queue.job("7", timeout_s=5.0)

    with pytest.raises(SlurmSilent, match="squeue has not answered for 5 s"):
        asyncio.run(asked())
