"""The daemon's log: lines on its standard error, which its agent reads and writes to the run directory."""

import logging
import os
import select
from contextlib import suppress


class NonBlockingHandler(logging.Handler):
    """Writes records as lines. One for which a pipe has no room is left out, and counted: who does not read stops nobody.

    Args:
        fd: where to. Only a pipe is sure to take what it has room for without a wait.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._left_out = 0  # since a line was written
        self._torn = False  # whether the last line that was written has no end
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n"
        with suppress(OSError):  # nobody is left who would read it
            if self._left_out and self._write(f"... {self._left_out} lines left out, which nobody has read\n"):
                self._left_out = 0
            if self._left_out or not self._write(line):
                self._left_out += 1

    def _write(self, line: str) -> bool:
        """Whether all of it was taken."""
        data = (f"\n{line}" if self._torn else line).encode(errors="replace")
        for start in range(0, len(data), select.PIPE_BUF):
            if not self._room.poll(0):
                self._torn |= start > 0
                return False
            os.write(self._fd, data[start : start + select.PIPE_BUF])  # which a pipe that is writable takes at once
        self._torn = False
        return True
