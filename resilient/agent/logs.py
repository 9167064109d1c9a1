"""The agent's log, written by a thread: its file is in the run directory, whose file system may stand still.

torch and everything else that uses `logging` go the same way. What does not fit into the queue is left out.
"""

import atexit
import contextlib
import logging
import logging.handlers
import queue
import threading

LINES = 10_000  # that may wait
FLUSH_S = 1.0  # at the end of the process


class _Queue(logging.handlers.QueueHandler):
    """Puts records into the queue, without waiting where it is full."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


def write_in_thread() -> None:
    """Hand the root logger's handlers over to a thread; the process's end waits for `FLUSH_S` at most until all is written."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(LINES)

    def write() -> None:
        while (record := waiting.get()) is not None:
            for handler in handlers:
                handler.handle(record)

    thread = threading.Thread(target=write, name="log", daemon=True)
    thread.start()

    def finish() -> None:
        try:
            waiting.put_nowait(None)
        except queue.Full:
            return
        thread.join(FLUSH_S)

    atexit.register(finish)
    root.handlers[:] = [_Queue(waiting)]
