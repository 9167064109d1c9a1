"""The cleanup guard: whatever becomes of the command that breaks a campaign, nothing of it is left running.

Its processes carry a tag in their environment. A guard, which outlives the command, calls
`python -m chaos.orchestration.cleanup TAG [LAB [RUN_DIR]]`: the campaign is ended, injectors get time to undo what they did, the
lab is taken down, and what a run has in RAM is removed.
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

from chaos.injectors.guard import Command, Guard
from chaos.verdict.leftovers import files
from resilient.imports import shadowing

CAMPAIGN, INJECTOR = "RESILIENT_CHAOS_CAMPAIGN", "RESILIENT_CHAOS_INJECTOR"
UNDO_S = 60.0  # for injectors to undo; then they are killed, and their guards do; then what of these hangs is killed
POLL_S = 0.05


class CleanupGuard:
    """Held by the command; what it starts is started with `campaign()` or `injector()` in its environment.

    Args:
        last: commands that are run when everything else has ended.
    """

    def __init__(self, last: Sequence[Command] = ()) -> None:
        self.tag = secrets.token_hex(8)
        self._guard = Guard()
        for command in last:
            self._guard.add(command)
        self._guard.add([*shadowing.running("chaos.orchestration.cleanup"), self.tag])

    def campaign(self) -> dict[str, str]:
        """Environment of what is ended at once."""
        return {CAMPAIGN: self.tag}

    def injector(self) -> dict[str, str]:
        """Environment of what may undo first."""
        return {INJECTOR: self.tag}

    def lab(self, name: str) -> None:
        """A lab that is taken down at the end; told before it is brought up."""
        self._guard.add([*shadowing.running("chaos.orchestration.cleanup"), self.tag, name])

    def run(self, run_dir: Path) -> None:
        """A run of which nothing stays in RAM, nor in temporary places."""
        self._guard.add([*shadowing.running("chaos.orchestration.cleanup"), self.tag, "", str(run_dir)])

    def end_campaigns(self) -> None:
        """Kill what is ended at once."""
        _end_campaigns(self.tag, time.monotonic() + UNDO_S)

    def __enter__(self) -> "CleanupGuard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._guard.release()


def tagged(variable: str, tag: str) -> list[psutil.Process]:
    """Processes that carry a tag."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(variable) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def sweep(tag: str, lab: str = "", run_dir: str = "") -> None:
    """End all that carries the tag, and the lab, and remove what a run has left."""
    _end_campaigns(tag, time.monotonic() + UNDO_S)
    _end_injectors(tag)
    if lab:
        _take_down(lab)
    for path in files(Path(run_dir)) if run_dir else ():
        shutil.rmtree(path, ignore_errors=True)


def _end_campaigns(tag: str, deadline: float) -> None:
    """Until the deadline: what does not end by SIGKILL waits in the kernel for what an injector still undoes."""
    while (campaign := tagged(CAMPAIGN, tag)) and time.monotonic() < deadline:
        _kill(campaign)
        time.sleep(POLL_S)


def _end_injectors(tag: str) -> None:
    """Whatever hangs has no more than its time: commands that undo may, as do those that ask a machine which is gone."""
    for kill in (_injectors, _innermost, _all_of_them):
        deadline = time.monotonic() + UNDO_S
        while found := tagged(INJECTOR, tag):
            if time.monotonic() > deadline:
                _kill(kill(found))
                break
            time.sleep(POLL_S)


def _injectors(found: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in found if _is_injector(process)]


def _innermost(found: list[psutil.Process]) -> list[psutil.Process]:
    """Commands without their guard, which goes on with the next one."""
    parents = set()
    for process in found:
        with contextlib.suppress(psutil.Error):
            parents.add(process.ppid())
    return [process for process in found if process.pid not in parents]


def _all_of_them(found: list[psutil.Process]) -> list[psutil.Process]:
    return found


def _take_down(lab: str) -> None:
    from chaos.lab.lab import Lab
    from chaos.lab.shape import LabPaths

    # Once more: commands of whoever was killed while it was bringing the lab up end a moment after it.
    for _ in range(2):
        Lab(LabPaths(lab)).down()
        time.sleep(10 * POLL_S)


def _is_injector(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "chaos.injectors.injector" in process.cmdline()
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sweep(*sys.argv[1:])
