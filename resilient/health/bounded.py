"""Checks that may hang: each in a process of its own, and killed when its time is over.

A process that hangs in the kernel (state D: a dead mount, a GPU that does not answer) survives even that; it is left behind rather
than waited for, and holds nothing that its parent needs.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from resilient.health.report import Finding, Verdict
from resilient.lifeline import die_with_parent

Clock = Callable[[], float]

KILL_S = 2.0  # within which a killed process is gone, unless the kernel holds it


class Process(Protocol):
    """A process of a context, as `multiprocessing` has them."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class Context(Protocol):
    """How processes come to be: `multiprocessing.get_context("spawn")`, or a node's fork server."""

    def Pipe(self, duplex: bool = True) -> tuple[Connection, Connection]: ...  # noqa: N802 - as multiprocessing has it
    def Process(self, *, target: Callable[..., object], args: tuple[Any, ...], name: str, daemon: bool) -> Process: ...  # noqa: N802


@dataclass(frozen=True)
class Task:
    """A check, or several, for one process.

    Attributes:
        names: the findings that it owes, by their check.
        run: a function of a module, called with `args` in the process.
        limit_s: from the start of its process.
        after: the finding of another task, before which this one does not begin; where that fails it never does.
    """

    names: tuple[str, ...]
    run: Callable[..., Iterable[Finding]]
    args: tuple[Any, ...]
    limit_s: float
    after: str = ""


class _Probe:
    """The process of a task."""

    def __init__(self, task: Task, context: Context, limit_s: float, clock: Clock) -> None:
        self._clock = clock
        self.owed = list(task.names)
        self.findings: list[Finding] = []
        self._limit_s = min(task.limit_s, limit_s)
        self.reader, writer = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(writer, task.run, task.args), name=task.names[0], daemon=True)
        self.process.start()
        writer.close()
        self.deadline = clock() + self._limit_s

    def collect(self) -> None:
        """Take what has come; settle what is owed if nothing more will come."""
        try:
            while self.owed and self.reader.poll():
                self._take(self.reader.recv())
        except (EOFError, OSError):
            self.process.join(KILL_S)
            self._owe_no_more(f"its process {_how(self.process.exitcode)} before it gave an answer")
        if self.owed and self._clock() >= self.deadline:
            doing = _doing(self.process.pid or 0)
            self.kill()
            self._owe_no_more(f"no answer within {self._limit_s:g} s; its process was {doing} and was killed")

    def kill(self) -> None:
        """The process, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may not lead a group yet

    def _take(self, message: Finding | str) -> None:
        if isinstance(message, str):
            self._owe_no_more(message)
            return
        self.findings.append(message)
        with suppress(ValueError):
            self.owed.remove(message.check)

    def _owe_no_more(self, why: str) -> None:
        self.findings += [Finding(name, "fail", why) for name in self.owed]
        self.owed = []


class Examination:
    """Tasks that run at the same time, but for those that come after another.

    Args:
        tasks: what to check.
        context: a fork server has what it has imported, a fresh process takes longer.
        limit_s: for all of them together.
        clock: seconds, any origin.
    """

    def __init__(self, tasks: Sequence[Task], context: Context, limit_s: float, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began_t = clock()
        self._context, self._limit_s = context, limit_s
        self._probes: list[_Probe] = []
        self._later = [task for task in tasks if task.after]
        self._never_begun: list[Finding] = []
        self.left_behind: list[int] = []
        try:
            for task in tasks:
                if not task.after:
                    self._begin(task, limit_s)
        except BaseException:
            self.close()
            raise

    def _begin(self, task: Task, limit_s: float) -> None:
        self._probes.append(_Probe(task, self._context, limit_s, self._clock))

    def _begin_later(self) -> None:
        """What was to come after something that has answered by now."""
        verdicts = {finding.check: finding.verdict for finding in self.findings}
        for task in [task for task in self._later if task.after in verdicts]:
            self._later.remove(task)
            verdict: Verdict = "skip"
            why = f"not looked at, for {task.after} has failed"
            if verdicts[task.after] != "fail":
                try:
                    self._begin(task, max(0.0, self._limit_s - self.took_s))
                    continue
                except OSError as error:
                    verdict, why = "fail", f"its process could not be started: {error}"
            self._never_begun += [Finding(name, verdict, why) for name in task.names]

    def waitable(self) -> list[Connection]:
        """What becomes readable when there is something to collect."""
        return [probe.reader for probe in self._probes if probe.owed]

    @property
    def pending(self) -> list[str]:
        """The checks that have not answered."""
        return [name for probe in self._probes for name in probe.owed] + [name for task in self._later for name in task.names]

    @property
    def left_s(self) -> float:
        """Until the next time limit."""
        return max(0.0, min((probe.deadline for probe in self._probes if probe.owed), default=0.0) - self._clock())

    @property
    def took_s(self) -> float:
        return self._clock() - self._began_t

    @property
    def findings(self) -> list[Finding]:
        """So far, in the order in which tasks have begun."""
        return [finding for probe in self._probes for finding in probe.findings] + self._never_begun

    def collect(self) -> bool:
        """Take what has come, kill what is over its time; whether all have answered. Never waits for a task."""
        for probe in self._probes:
            if probe.owed:
                probe.collect()
        self._begin_later()
        return not self.pending

    def finish(self, on_answer: Callable[[], None] = lambda: None) -> list[Finding]:
        """Wait for all; `on_answer` is called whenever something has come, and every quarter of a second."""
        while not self.collect():
            on_answer()
            wait(self.waitable(), min(self.left_s, 0.25))
        on_answer()
        return self.findings

    def close(self) -> None:
        """Kill what still runs. Those that do not go are in `left_behind`."""
        for probe in self._probes:
            probe.kill()
        deadline = time.monotonic() + KILL_S
        for probe in self._probes:
            probe.process.join(max(0.0, deadline - time.monotonic()))
            if probe.process.exitcode is None:
                self.left_behind.append(probe.process.pid or 0)
            else:
                probe.process.close()
            probe.reader.close()
        self._probes, self._later = [], []


def _serve(writer: Connection, run: Callable[..., Iterable[Finding]], args: tuple[Any, ...]) -> None:
    """In the process: check, tell, and stay: peers may still be reading what this one has sent them."""
    die_with_parent(os.getppid())
    os.setsid()
    # Whoever reads the parent's output does not wait for a process that is left behind, nor for multiprocessing's tracker of
    # resources, which has that output too and lives until all have let go of it.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    if parent_process() is not None and (tracked := resource_tracker.getfd()) is not None:  # not where a fork server forked it
        os.close(tracked)
    try:
        for finding in run(*args):
            writer.send(finding)
    except BaseException as error:  # noqa: BLE001 - whatever ends a check is what it has found
        last = traceback.extract_tb(error.__traceback__)[-1]
        writer.send(f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")
    signal.pause()


def _how(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its connection"
    return f"was ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with status {exitcode}"


_STATES = {"R": "running", "S": "waiting", "D": "stuck in the kernel", "T": "stopped", "t": "traced", "Z": "gone"}


def _doing(pid: int) -> str:
    """State of a process and what it waits for in the kernel, in words."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    words = _STATES.get(state, f"in state {state}")
    with suppress(OSError):
        place = Path(f"/proc/{pid}/wchan").read_text()
        if state in "SD" and place not in ("", "0"):
            return f"{words} ({place})"
    return words
