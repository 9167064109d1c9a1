"""Processes that are hit: told apart from others that have got their number since, and brought into a state."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from chaos.fault import CannotInject
from chaos.injectors.guard import Command

TAKES_S = 10.0  # for a signal, until it shows

# $1: process id, $2: when it was started, in ticks since the boot. Its number may be another one's by now.
_CONTINUE = 'case "$(cat "/proc/$1/stat" 2>/dev/null)" in *") "*" $2 "*) kill -CONT "$1";; esac'


def continues(process: psutil.Process) -> Command:
    """The command that continues a process which was stopped, if it is still there."""
    started = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    return ["sh", "-c", _CONTINUE, "sh", str(process.pid), started]


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end(process: psutil.Process, sig: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal that ends it, and return when it has ended.

    Raises:
        CannotInject: it does not end, or has ended by itself.
    """
    if is_gone(process):
        raise CannotInject(f"process {process.pid} has ended by itself")
    process.send_signal(sig)
    until(lambda: is_gone(process), f"process {process.pid} is still there after {sig.name}")


def end_at_once(processes: Iterable[psutil.Process]) -> list[int]:
    """Stop all of them, then kill all of them, so that none sees another one's end; their ids, once they are gone."""
    found = [process for process in processes if not is_gone(process)]
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for process in found:
            try:
                os.kill(process.pid, sig)
            except ProcessLookupError:
                continue
    until(lambda: all(is_gone(process) for process in found), "processes do not end")
    return [process.pid for process in found]


def until(holds: Callable[[], bool], otherwise: str) -> None:
    """Return once it holds.

    Raises:
        CannotInject: it does not within some seconds.
    """
    deadline = time.monotonic() + TAKES_S
    while not holds():
        if time.monotonic() > deadline:
            raise CannotInject(otherwise)
        time.sleep(0.002)
