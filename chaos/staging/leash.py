"""The leash: whatever becomes of the command that breaks a campaign, nothing of it is left running.

Its processes carry a mark in their environment. A guard, which outlives the command, calls
`python -m chaos.staging.leash MARK [LAB [RUN_DIR]]`: the campaign is ended, hands get time to undo what they did, the lab is taken
down, and what a run has in RAM is removed.
"""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from chaos.hands.guard import Command, Guard
from chaos.judging.leftovers import files

CAMPAIGN, HAND = "RESILIENT_CHAOS_CAMPAIGN", "RESILIENT_CHAOS_HAND"
UNDO_S = 60.0  # for hands to undo; then they are killed, and their guards do
POLL_S = 0.05


class Leash:
    """Held by the command; what it starts is started with `campaign()` or `hand()` in its environment.

    Args:
        last: commands that are run when everything else has ended.
    """

    def __init__(self, last: Sequence[Command] = ()) -> None:
        self.mark = secrets.token_hex(8)
        self._guard = Guard()
        for command in last:
            self._guard.add(command)
        self._guard.add([sys.executable, "-m", "chaos.staging.leash", self.mark])

    def campaign(self) -> dict[str, str]:
        """Environment of what is ended at once."""
        return {CAMPAIGN: self.mark}

    def hand(self) -> dict[str, str]:
        """Environment of what may undo first."""
        return {HAND: self.mark}

    def lab(self, name: str) -> None:
        """A lab that is taken down at the end; told before it is brought up."""
        self._guard.add([sys.executable, "-m", "chaos.staging.leash", self.mark, name])

    def run(self, run_dir: Path) -> None:
        """A run of which nothing stays in RAM, nor in temporary places."""
        self._guard.add([sys.executable, "-m", "chaos.staging.leash", self.mark, "", str(run_dir)])

    def end_campaigns(self) -> None:
        """Kill what is ended at once."""
        _end_campaigns(self.mark, time.monotonic() + UNDO_S)

    def __enter__(self) -> "Leash":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._guard.release()


def marked(variable: str, mark: str) -> list[psutil.Process]:
    """Processes that carry a mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def sweep(mark: str, lab: str = "", run_dir: str = "") -> None:
    """End all that carries the mark, and the lab, and remove what a run has left."""
    deadline = time.monotonic() + UNDO_S
    _end_campaigns(mark, deadline)
    while hands := marked(HAND, mark):
        if time.monotonic() > deadline:
            _kill([process for process in hands if _is_hand(process)])
            deadline += UNDO_S
        time.sleep(POLL_S)
    if lab:
        _take_down(lab)
    for path in files(Path(run_dir)) if run_dir else ():
        shutil.rmtree(path, ignore_errors=True)


def _end_campaigns(mark: str, deadline: float) -> None:
    """Until the deadline: what does not end by SIGKILL waits in the kernel for what a hand still undoes."""
    while (campaign := marked(CAMPAIGN, mark)) and time.monotonic() < deadline:
        _kill(campaign)
        time.sleep(POLL_S)


def _take_down(lab: str) -> None:
    from chaos.lab.lab import Lab
    from chaos.lab.shape import Place

    # Once more: commands of whoever was killed while it was bringing the lab up end a moment after it.
    for _ in range(2):
        Lab(Place(lab)).down()
        time.sleep(10 * POLL_S)


def _is_hand(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "chaos.hands.hand" in process.cmdline()
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sweep(*sys.argv[1:])
