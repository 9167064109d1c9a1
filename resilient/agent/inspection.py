"""Inspection of workers: what their processes are doing, and where in the code.

Owns the reading of /proc and the asking for stacks. faulthandler answers in the worker's main thread, at a signal that nobody else
uses and without the interpreter's help, so that a worker which is stuck anywhere but in the kernel still says where. It writes that
thread alone: the others run meanwhile, and reading frames that are changing ends the process (SIGSEGV). They are read by
`resilient.agent.recorder`, which waits for the interpreter.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from resilient.agent.effort import OwnTime
from resilient.protocol.messages import Inspection

STACKS_SIGNAL = signal.SIGRTMIN + 7
WINDOW_S = 0.2  # over which the processor time is measured
ANSWER_S = 1.5  # in which stacks are expected: a rank answers when it next gets a core, but not while it sits in the kernel
STOPS_S = 1.0  # in which a process that ran for its stacks has stopped again: it takes the signal when it next gets a core
EXITING = 0x4  # PF_EXITING among the flags of a process, see the kernel's sched.h
_libc = ctypes.CDLL(None)
CRASH = "Fatal Python error: "  # with which faulthandler begins
_ABOVE = f'  File "{Path(__file__).with_name("bootstrap.py")}", '  # our own functions, which have called the entry point
_MODULES = "\nExtension modules: "  # that are loaded
CRASH_CHARS = 2000  # of what it says; the innermost functions are first
CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})  # that it tells of
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def answer_with_stacks(path: Path) -> None:
    """In the main thread of a worker: write its stack to this file whenever it is asked for.

    The first line of the file names the outermost function, with which a stack ends.
    """
    file = path.open("w")  # open for as long as the process lives
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    file.write(f"{frame.f_code.co_name}\n")
    file.flush()
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False, chain=False)
    if not faulthandler.is_enabled():  # by PYTHONFAULTHANDLER, whose user looks for it in the log
        faulthandler.enable(file=file, all_threads=False)


def crash_of(path: Path) -> str:
    """Where a worker was that has crashed, as `faulthandler` has it, from `Fatal Python error` on; "" where it has not said so.

    Args:
        path: as `answer_with_stacks` had it.
    """
    with contextlib.suppress(OSError):
        _, found, crash = path.read_text(errors="replace").rpartition(CRASH)
        return f"{found}{crash.partition(_ABOVE)[0].partition(_MODULES)[0]}"[:CRASH_CHARS].rstrip() if found else ""
    return ""


def state_of(pid: int) -> str:
    """State of a process as /proc tells it; "" if there is none."""
    return _stat(pid)[0]


def failure_of(pid: int) -> int | None:
    """With what exit status a process fails that the kernel is about to end, as `multiprocessing` has it; None for any other.

    A process that was killed is gone for its peers once its sockets are closed, and ends only when all else that it holds is given
    back: a GPU's memory, which takes seconds, or a file on a file system that stands still. See do_exit in the kernel's exit.c.
    """
    fields = _fields(pid)
    if len(fields) < 50 or not int(fields[6]) & EXITING:
        return None
    status = int(fields[49])  # 0, too, for those who may not see it
    return os.waitstatus_to_exitcode(status) if status else None


def inspect(workers: Mapping[int, tuple[int, Path]]) -> dict[int, Inspection]:
    """Inspect workers that answer: process id and file of stacks, by rank. It takes a moment, and `ANSWER_S` twice at most.

    A worker that is stopped is continued for it, and stopped again, unless all are: then the job may have been suspended. `cpu` is
    the share of one core that it used before it was asked, or that its main thread would have if nobody else had; `stacks` is that
    of the main thread, the most recent call first, and is empty where it did not answer; other threads and the standing are left to
    others.
    """
    able = {rank for rank, (pid, _) in workers.items() if _handles_signal(pid)}
    states, shares = _shares({rank: pid for rank, (pid, _) in workers.items()})
    able |= {rank for rank, (pid, _) in workers.items() if _handles_signal(pid)}  # who answered somebody else before has done so
    sizes = {rank: _size(stacks) for rank, (_, stacks) in workers.items()}
    stopped = {rank: workers[rank] for rank, state in states.items() if state == "T"}
    asked_t = time.monotonic()
    for rank, (pid, _) in workers.items():
        if rank not in stopped:
            _ask(pid)
    stacks_by_rank = stacks_of_stopped(stopped) if len(stopped) < len(workers) else {}
    asked = [(pid, stacks, sizes[rank]) for rank, (pid, stacks) in workers.items() if rank in able - stopped.keys()]
    _wait_for_stacks(asked, asked_t + ANSWER_S)
    found = {}
    for rank, (_, stacks) in workers.items():
        text = stacks_by_rank[rank] if rank in stacks_by_rank else _from(stacks, sizes[rank])[0]
        found[rank] = Inspection(state=states[rank], cpu=shares[rank], stacks=text)
    return found


def _shares(pids: Mapping[int, int]) -> tuple[dict[int, str], dict[int, float]]:
    """The states of processes, and what share of a core each wants over `WINDOW_S`.

    They are not asked for anything meanwhile: one that sleeps and waits for a core to answer on would look like one that computes.
    """
    own = {rank: OwnTime(pid) for rank, pid in pids.items()}
    wanted_s = {rank: each.seconds() or 0.0 for rank, each in own.items()}
    before = {rank: _stat(pid) for rank, pid in pids.items()}
    began = time.monotonic()
    time.sleep(WINDOW_S)
    shares = {}
    for rank, pid in pids.items():
        wanted = (own[rank].seconds() or 0.0) - wanted_s[rank]
        used = max(_stat(pid)[1] - before[rank][1], wanted) / (time.monotonic() - began)
        shares[rank] = round(max(0.0, used), 2)
        own[rank].close()
    return {rank: state for rank, (state, _) in before.items()}, shares


def stacks_of_stopped(workers: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """The stacks of workers that are stopped; each is continued only until it has written them, for `ANSWER_S` in all at most.

    All are stopped again when this returns, but for one that gets no core within `STOPS_S`.
    """
    unresponsive = {rank for rank, (pid, _) in workers.items() if not _handles_signal(pid)}
    found = dict.fromkeys(unresponsive, "")
    workers = {rank: each for rank, each in workers.items() if rank not in unresponsive}
    sizes = {rank: _size(stacks) for rank, (_, stacks) in workers.items()}
    for pid, _ in workers.values():
        _ask(pid)  # is waiting when it is continued, and answered before anything else is done
    deadline = time.monotonic() + ANSWER_S
    for rank, (pid, stacks) in workers.items():
        _signal(pid, signal.SIGCONT)
        while not _from(stacks, sizes[rank])[1] and time.monotonic() <= deadline:
            time.sleep(0.0005)
        _signal(pid, signal.SIGSTOP)
        found[rank], _ = _from(stacks, sizes[rank])
    deadline = time.monotonic() + STOPS_S
    while any(state_of(pid) not in ("T", "Z", "") for pid, _ in workers.values()) and time.monotonic() < deadline:
        time.sleep(0.0005)
    return found


def _wait_for_stacks(asked: Collection[tuple[int, Path, int]], deadline: float) -> None:
    """Wait until all have answered that can. A process has the signal blocked while it answers.

    Args:
        asked: process id, file, and how long it was before; of processes that handle the signal.
    """

    def silent(pid: int, stacks: Path, size: int) -> bool:
        lines, whole = _from(stacks, size)
        return not whole and state_of(pid) in (("R", "S", "D") if lines else ("R", "S"))

    while any(silent(*each) for each in asked) and time.monotonic() < deadline:
        time.sleep(0.005)


def bears(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, or waits for it. Another one, such as a program that a script has put in its
    place, would be ended by it.
    """
    return _has(pid, "SigCgt", number) or _has(pid, "SigBlk", number)


def _handles_signal(pid: int) -> bool:
    """Whether a process takes the signal: a script may have blocked all there are."""
    return _has(pid, "SigCgt", STACKS_SIGNAL) and not _has(pid, "SigBlk", STACKS_SIGNAL)


def _has(pid: int, mask: str, number: int) -> bool:
    """Whether a signal is in a mask of a process, as /proc/PID/status names it; in none where there is no such process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    bits = next((line for line in status.splitlines() if line.startswith(mask)), ":\t0").partition(":\t")[2]
    return bool(int(bits, 16) >> (number - 1) & 1)


def _ask(pid: int) -> None:
    """Ask the main thread: any other one that took the signal would write its own stack."""
    if bears(pid, STACKS_SIGNAL):
        _libc.tgkill(pid, pid, STACKS_SIGNAL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _stat(pid: int) -> tuple[str, float]:
    """State, and seconds of processor time."""
    fields = _fields(pid)
    return (fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S) if fields else ("", 0.0)


def _fields(pid: int) -> list[str]:
    """What /proc/PID/stat says after the name, from the state on; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _from(path: Path, offset: int) -> tuple[str, bool]:
    """The lines of a file of stacks from there on, and whether they go to the outermost call, or as deep as faulthandler goes."""
    try:
        with path.open("rb") as file:
            outermost = file.readline()
            file.seek(max(offset, len(outermost)))
            found = file.read()
    except OSError:
        return "", False
    lines = found[: found.rfind(b"\n") + 1]
    whole = lines.endswith((b" in " + outermost, b"  ...\n"))
    return lines.decode(errors="replace").replace("Stack (most", "Current thread (most"), whole
