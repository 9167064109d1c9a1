"""The daemon's standard output: news wait in a queue, so that an agent which does not read stops nobody."""

import logging
import os
import queue
import threading

from checkpoint.framing import encode
from checkpoint.protocol import DaemonNews

log = logging.getLogger(__name__)

LIMIT = 100_000
"""Messages that wait. An agent that far behind is as good as dead; the next daemon tells it what is held."""


class Outlet:
    """Writes news as lines, in the order in which they were reported.

    Args:
        fd: of a pipe.

    Invariant: one thread writes, so a line is never torn; `report` never blocks. Whoever cannot be told ends the daemon: without a
    reader it works for nobody, until `outlive_reader` was called.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._needs_reader = True
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="outlet", daemon=True)
        self._thread.start()

    def report(self, news: DaemonNews) -> None:
        """Queue a message."""
        if self._lines.qsize() >= LIMIT:
            log.error("the snapshot daemon ends: its agent has left %d messages unread", LIMIT)
            os._exit(1)
        self._lines.put(encode(news))

    def outlive_reader(self) -> None:
        """What the daemon does from now on is also to be done where nobody is left to be told."""
        self._needs_reader = False

    def close(self, patience_s: float) -> None:
        """Write what waits; give up after so long."""
        self._lines.put(None)
        self._thread.join(patience_s)

    def _write(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                while line:
                    line = line[os.write(self._fd, line) :]
        except OSError:
            if self._needs_reader:
                os._exit(0)  # the agent is dead
