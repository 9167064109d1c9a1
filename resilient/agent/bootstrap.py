"""What a worker process does before and after the entry point.

Runs in the forked child. It shields the worker from signals that are for the driver, sends its output to the agent, and leaves the
exception that ended it in the region before anything is torn down.
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from resilient import clock, entry, worker
from resilient.agent import groups, inspection, program, recorder
from resilient.excerpts import excerpt
from resilient.exits import Exit
from resilient.heartbeat.layout import RAISED
from resilient.lifeline import flush_streams, pass_over
from resilient.placement.applied import take_place
from resilient.script import replaced

_CAUSES = 8  # of the exceptions that one was raised from, the nearest
_CAUSE_CHARACTERS = 2000
_MESSAGE_CHARACTERS = 8 << 10  # more of an exception's text is only in the rank's log
_TRACEBACK_CHARACTERS = 64 << 10

_SHIELDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class WorkerSpec:
    """All that a worker is told: its environment, the named pipe that it prints to, and what to call."""

    environ: Mapping[str, str]
    output: Path
    stacks: Path
    record: Path
    config: Path
    entrypoint: str


def shield() -> None:
    """First of all in a forked process: leave signals to the driver. The fork server has tied its life to its own."""
    os.setsid()
    for sig in _SHIELDED:
        signal.signal(sig, pass_over)  # not SIG_IGN, which programs that the rank starts would inherit
        signal.siginterrupt(sig, False)
    os.register_at_fork(after_in_child=_unshield)


def start_rank(spec: WorkerSpec) -> None:
    """All that a process forked for this rank does."""
    shield()
    run_rank(spec)


def run_rank(spec: WorkerSpec, config: worker.Config | None = None) -> None:
    """Run the entry point as one rank; the process ends with status 0, or 1 after an exception.

    So does a process that the script has forked and that comes back from it, but nothing of that is told of the rank.

    Args:
        config: where it has been read already.
    """
    rank_pid = os.getpid()
    _redirect(spec.output)
    inspection.answer_with_stacks(spec.stacks)
    recorder.answer_with_record(spec.record)
    os.environ.update(spec.environ)
    if entry.parse(spec.entrypoint).is_script:
        _draw_numbers_of_its_own()
    take_place()  # before the first thread that computes, and all threads of a standby
    if (torch := sys.modules.get("torch")) is not None and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it was imported before that was known
    progress = None
    try:
        context = worker.init()
        if context.collective_timeout_s is not None:
            groups.wait_at_most(context.collective_timeout_s)
        if (prefix := os.environ.pop(groups.PREFIX_VARIABLE, "")) != "":
            groups.meet_below(prefix)
            groups.meet_in_files_of(context.generation)
        if injection := os.environ.get(worker.CHAOS_VARIABLE):
            importlib.import_module(injection).arm(context)
        progress = worker.observe_progress()
        replaced.watch()
        entry.run(entry.parse(spec.entrypoint), lambda: config or worker.load_config(spec.config))
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is evidence
        is_rank = os.getpid() == rank_pid
        if progress is not None and is_rank:
            progress.ends()
        status = _status(error) if isinstance(error, SystemExit) else 1
        is_script = entry.parse(spec.entrypoint).is_script
        if status == 0 and is_script:
            if is_rank:
                worker.ended()
            program.end_threads_and_handlers()
        # A script that catches what ends it and leaves by `sys.exit` ends of what it has caught.
        ended_by = _cause_of(error) if isinstance(error, SystemExit) else error
        if status != 0 and is_rank:
            worker.failed(ended_by)
            worker.report(_raised(ended_by), event=RAISED)
        if not isinstance(error, SystemExit):
            (program.tell_of if is_script else traceback.print_exception)(error)
        _leave(status, is_script=is_script)
    is_rank, is_script = os.getpid() == rank_pid, entry.parse(spec.entrypoint).is_script
    if progress is not None and is_rank:
        progress.ends()
    if is_script:
        if is_rank:
            worker.ended()
        program.end_threads_and_handlers()
    _leave(0, is_script=is_script)


def _draw_numbers_of_its_own() -> None:
    """As a process of its own does that nobody has seeded: else all ranks would draw what the one that they were forked from would
    have drawn. Python's generator does so by itself, and GPUs begin with the same number in every process."""
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _status(error: SystemExit) -> int:
    """What the interpreter would end with; a text is printed."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    with suppress(Exception):  # the script may have closed it, or put something else in its place
        sys.stderr.write(f"{error.code}\n")
    return 1


def _raised(error: BaseException) -> dict[str, object]:
    """The fields of `resilient.recovery.faults.Raised`; of a long text only its ends."""
    whole = _text(error)
    message = excerpt(whole, _MESSAGE_CHARACTERS)
    traceback_text = "".join(traceback.format_exception(error))
    if message != whole:
        traceback_text = traceback_text.replace(whole, message)
    numbers = {"kind": error.kind, "since": error.since} if isinstance(error, worker.BadNumbersError) else {}
    return {
        "type": type(error).__name__,
        "message": message,
        "traceback": excerpt(traceback_text, _TRACEBACK_CHARACTERS),
        "t": clock.now(),
        "final": _final(error),
        "causes": "\n".join(f"{type(each).__name__}: {_text(each)[:_CAUSE_CHARACTERS]}" for each in _origins(error)),
        **numbers,
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # noqa: BLE001 - its `__str__` is the script's own code
        return f"(its text cannot be had: {type(why).__name__})"


def _cause_of(error: SystemExit) -> BaseException:
    """Why a script has left: what it has caught before, or what it says by `sys.exit`."""
    return _origin(error) or error


def _origin(error: BaseException) -> BaseException | None:
    """What an exception was raised from, or while it was handled."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _origins(error: BaseException) -> list[BaseException]:
    """The nearest first; not all of a chain that has no end."""
    found: list[BaseException] = []
    origin = _origin(error)
    while origin is not None and len(found) < _CAUSES and origin is not error and origin not in found:
        found.append(origin)
        origin = _origin(origin)
    return found


def _final(error: BaseException) -> int | None:
    """The exit code of the run if trying again cannot help."""
    if isinstance(error, worker.ConfigError):
        return int(Exit.CONFIG)
    return int(Exit.GAVE_UP) if isinstance(error, worker.UnrecoverableError) else None


def _leave(status: int, *, is_script: bool) -> NoReturn:
    """End the process here: a rank that lingers in a destructor, or waits for a child of its own, delays everyone."""
    if is_script:
        program.write_open_files()
    flush_streams()
    os._exit(status)


def _unshield() -> None:
    for sig in _SHIELDED:
        signal.signal(sig, signal.SIG_DFL)


def _redirect(output: Path) -> None:
    fd = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):  # a module may have put others in their place
        if isinstance(stream, TextIOWrapper):
            with suppress(ValueError):  # it is closed, or its buffer another stream's
                stream.reconfigure(line_buffering=True)
