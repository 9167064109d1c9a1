"""What is printed, without waiting for where it goes: a job's output is a file, often in the run directory.

Owns a thread that writes for a text stream. What a terminal does not take fills no memory: beyond a bound the oldest text is left
out.
"""

import io
import threading
from collections import deque
from typing import TextIO

KEPT_CHARACTERS = 1 << 20


class PatientStream(io.TextIOBase):
    """A text stream that never blocks.

    Invariant: `_waiting` holds at most KEPT_CHARACTERS, or one text.

    Args:
        stream: where the text goes in the end.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: deque[str] = deque()
        self._size = 0
        self._busy = False
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._changed:
            self._waiting.append(text)
            self._size += len(text)
            while self._size > KEPT_CHARACTERS and len(self._waiting) > 1:
                self._size -= len(self._waiting.popleft())
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Nothing is waited for; see `drain`."""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if not self._waiting:
                    return
                text = "".join(self._waiting)
                self._waiting.clear()
                self._size = 0
                self._busy = True
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                continue  # nobody reads it any more, or there is no room for it

    def drain(self, patience_s: float) -> bool:
        """Wait until all is printed; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, patience_s)

    def end(self, patience_s: float) -> bool:
        """Print what is left and end the thread; whether that was done in time."""
        done = self.drain(patience_s)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        return done
