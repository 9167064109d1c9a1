"""Commands that run others, and end them when they are asked to end themselves."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from resilient.exits import Exit, ForeseenError


class Interrupted(ForeseenError):
    """Somebody wants the end."""

    code = Exit.STOPPED


@contextmanager
def interruptible(what_then: str) -> Iterator[None]:
    """SIGTERM, Ctrl-C and the terminal's end raise Interrupted, each once, so that what was started is ended.

    What is ignored stays so (nohup).

    Args:
        what_then: the message's end: what becomes of the work.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise Interrupted(f"stopped by {signal.Signals(number).name}; {what_then}")

    ends = [each for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in ends}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
