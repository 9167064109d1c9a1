"""What the threads of this process execute."""

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by its `ident`.

    Python 3.11 makes them while it holds the lock of all threads. Were garbage collected then, a finalizer that starts a thread or
    lets another one run would wait for that lock for ever, and the whole process behind it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
