"""Questions to file systems that may never answer: each in a thread of its own, which is waited for only so long.

A thread that waits in the kernel is left there, and nothing waits for it.
"""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def answers(ask: Callable[[Path], T], paths: Iterable[Path], limit_s: float) -> dict[Path, T | OSError]:
    """What there is to say of each path, or why it failed; nothing of a path whose file system has not answered in time.

    Args:
        ask: called in a thread for each path.
        limit_s: for all of them together.
    """
    found: dict[Path, T | OSError] = {}

    def work(path: Path) -> None:
        try:
            found[path] = ask(path)
        except OSError as error:
            found[path] = error

    threads = [threading.Thread(target=work, args=(path,), name="asking", daemon=True) for path in paths]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)
