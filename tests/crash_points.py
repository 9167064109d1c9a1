"""Processes that are killed at one of their calls, so that a test can try every moment between two of them."""

import os
import signal
from collections.abc import Callable
from typing import Any


def crashing_at(number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wrap functions so that this process is killed at the call of this number, counted from 0, of all of them together."""
    left = number

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **named)

        return call

    return wrapped
