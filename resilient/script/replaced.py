"""Ranks whose script replaces their process by another program (`os.execv`): what watches a rank does not come along.

Owns the telling, once for each process. The program is started as the script asks for it.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

log = logging.getLogger(__name__)

SAID = (
    "%s replaces the process of this rank by %s (os.%s): steps, hangs and checkpoints of that program are not seen but for what it "
    "says by resilient.worker or resilient.attach, and it is not stopped at a step. Its process groups meet at the MASTER_ADDR and "
    "MASTER_PORT that it is given, and nowhere else. Better give `resilient run` that program, and set what it needs of the "
    "environment for the command"
)
_OS = os.execvp.__code__.co_filename

_watched: int | None = None  # the process of the rank, until it was told


def watch() -> None:
    """Have it told from now on in this process; not in those that it forks, which are to be other programs.

    Python's other calls, such as `os.execlp`, come to these two, once for each directory of PATH.
    """
    global _watched
    _watched = os.getpid()
    os.execv, os.execve = _telling(os.execv), _telling(os.execve)


def _telling(replace: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(replace)
    def replaces(path: Any, *arguments: Any, **more: Any) -> NoReturn:
        global _watched
        if os.getpid() == _watched and os.access(path, os.X_OK):
            _watched = None
            program = f"descriptor {path}" if isinstance(path, int) else os.fsdecode(path)
            log.warning(SAID, _caller(), program, replace.__name__)
        replace(path, *arguments, **more)

    return replaces


def _caller() -> str:
    """File and line of what calls for it, outside of Python's own `os`."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == _OS and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
