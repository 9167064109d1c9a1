"""Lifelines: a process that must not outlive its parent, and the name under which it is found.

Owns the Linux calls for both. Everything below the driver hangs on such a line, so that a killed driver leaves nothing behind.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

# What asks a run to stop. A scheduler sends it to every process of a job, and the driver alone decides what it comes to.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def leave_stops_to_the_driver() -> None:
    """Ignore from now on what asks a run to stop."""
    for sig in STOP_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)


def pass_over(number: int, frame: FrameType | None) -> None:
    """Handles a signal that is for the driver by doing nothing."""


def die_with_parent(parent_pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `sig` to this process when the thread that started it ends.

    Args:
        parent_pid: who started this process; if it has gone already, the signal is sent at once.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), sig)


def name_process(name: str) -> None:
    """Give this process a name that `ps -e`, `top` and `pkill` know; the kernel keeps 15 characters of it.

    Forked processes all have the command line of the agent that they come from.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def name_of(pid: int) -> str:
    """What `name_process` has named it, or the kernel; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def adopt_orphans() -> None:
    """Be the parent of all processes below this one whose own parent has ended. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children_of(pid: int) -> list[int]:
    """The children that the main thread of a process has; none where the kernel does not tell (CONFIG_PROC_CHILDREN)."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def flush_streams() -> None:
    """Write what this process has printed, before `os._exit`.

    A stream that the program has closed, or put something else in the place of, keeps nobody from ending, as in the interpreter.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
