"""Whether the file systems that a job begins on answer: who waits for one in the kernel is deaf to signals and says nothing.

Owns the threads that ask, one for each path. The thread that waits for them gets signals, and one that stays in the kernel holds up
nothing.
"""

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import typer

from resilient.exits import EnvironmentUnusable

SAY_S = 2.0  # of silence, then it is told
AGAIN_S = 60.0  # and again
POLL_S = 0.2  # in which a signal is heard at the latest


class DoesNotAnswer(EnvironmentUnusable):
    """A file system hangs. Nothing of the campaign can be read or written."""


def must_answer(paths: Mapping[str, Path], limit_s: float) -> None:
    """Return once every path's file system has answered, whatever the answer is; on standard error it says what takes long.

    Args:
        paths: by what names them, as a key of the config.
        limit_s: for all of them together.

    Raises:
        DoesNotAnswer: one has not by then.
    """
    asked = [(key, path, threading.Thread(target=_ask, args=(path,), daemon=True)) for key, path in paths.items()]
    for _, _, thread in asked:
        thread.start()
    began = time.monotonic()
    told_s = SAY_S
    for key, path, thread in asked:
        while thread.is_alive():
            waited_s = time.monotonic() - began
            if waited_s >= limit_s:
                raise DoesNotAnswer(f"{key}: the file system of {path} has not answered for {waited_s:.0f} s")
            if waited_s >= told_s:
                said = f"{key}: the file system of {path} has not answered for {waited_s:.0f} s; it is waited for {limit_s:g} s"
                typer.echo(f"resilient: {said}", err=True)
                told_s = waited_s + AGAIN_S
            thread.join(min(POLL_S, limit_s - waited_s))


def _ask(path: Path) -> None:
    with suppress(OSError, ValueError):  # an answer
        os.stat(path)  # noqa: PTH116 - what is asked is the system
