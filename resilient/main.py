"""The command `resilient` as a whole: command groups of other packages, exit codes, and signals before a start."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from resilient.exits import EnvironmentUnusable, Exit, ForeseenError

if TYPE_CHECKING:
    from typer import Typer

    from resilient.driver.driver_log import DriverLog

COMMANDS = "resilient.commands"  # entry points by which other packages add command groups
INTERRUPTED = 128 + signal.SIGINT  # as a shell tells it, and the parser of the command line


def main() -> None:
    """Entry point of the console script."""
    with _ended_by_interrupt():
        _make_ready()
        from resilient.cli import app

        _add_groups(app, sys.argv[1:])
    sys.exit(guarded(app))


def command_line(app: Callable[[], Any]) -> NoReturn:
    """What is behind the console script of another package: it ends and complains as this one."""
    with _ended_by_interrupt():
        _make_ready()
    sys.exit(guarded(app))


def _make_ready() -> None:
    """Make this process one that gets its signals, has its three streams, and writes whatever it is to say."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the caller has blocked would never arrive, not even a stop
    from resilient.driver.terminal import keep_descriptors

    keep_descriptors()
    for stream in (sys.stdout, sys.stderr):  # what a locale cannot show is no reason to end
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Meanwhile Ctrl-C ends the process by its signal: there is nothing to clean up. Where it is ignored, it stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _add_groups(app: "Typer", words: Sequence[str]) -> None:
    """Add the command groups of other packages: all of them where help, completion or an error may list them, else what is called.

    Args:
        words: of the command line.
    """
    called = words[0] if words else ""
    if called in {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}:
        return  # a start does without the other packages, and without a look at everything that is installed
    from importlib.metadata import entry_points

    points = sorted(entry_points(group=COMMANDS), key=lambda point: point.name)
    for point in [point for point in points if point.name == called] or points:
        app.add_typer(point.load(), name=point.name)


def guarded(command: Callable[[], Any]) -> int:
    """Run the command line; every foreseen error becomes one message and its exit code."""
    try:
        _run(command)
    except ForeseenError as error:
        return complain(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ModuleNotFoundError as error:  # of importlib.metadata, too
        if error.name != "resilient":
            raise
        root = Path(__file__).parents[1]
        return complain(
            EnvironmentUnusable(f"{root} is not installed for {sys.executable}: {sys.executable} -m pip install {root}")
        )
    except BrokenPipeError:
        _give_up_output()  # whoever read it has gone; nothing more can be said
        return 1
    except OSError as error:
        if error.errno is None:
            raise
        _give_up_output()
        return complain(EnvironmentUnusable(_in_words(error)))
    return Exit.OK


def _in_words(error: OSError) -> str:
    """An error of the system in words."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the working directory was deleted: go to another one"
    return error.strerror or str(error)


def _run(command: Callable[[], Any]) -> None:
    """And write what it has said, while an error of that can still be told."""
    try:
        command()
    except SystemExit as end:  # of the command line's parser, also where all went well
        (_give_up_output if end.code else _flush_output)()  # a code that says more is not lost
        raise
    _flush_output()


def _flush_output() -> None:
    if sys.stdout is not None:  # it may have been closed before
        sys.stdout.flush()


def _give_up_output() -> None:
    """What cannot be written must not be tried again by Python at its exit."""
    try:
        _flush_output()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(error: ForeseenError) -> Exit:
    """Say on standard error what keeps the command from going on; the exit code for it."""
    prefix = "" if error.code is Exit.CONFIG else "resilient: "  # a config's problems start with file and line
    if sys.stderr is not None:  # it may have been closed before
        with suppress(OSError):
            sys.stderr.write(f"{prefix}{error}\n")
    return error.code


def stop_early_on_signals(log: "DriverLog") -> None:
    """Until the driver takes the signals over, a stop has nothing to save: it ends the command at once, with its own status."""
    from resilient.driver.hangup import Hangup
    from resilient.driver.terminal import print_at_once

    def stop(number: int, _: object) -> NoReturn:
        print_at_once(f"resilient: stopped by {signal.Signals(number).name} before anything was started\n")
        os._exit(Exit.STOPPED)

    Hangup(log).install()

    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(sig, stop)
