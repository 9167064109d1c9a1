"""`driver.log`: all that a campaign's command has said, in its run directory, whatever has become of the terminal.

Owns the lines from when they are said, in any thread, until the run directory's writer takes them. `resilient.driver.rundir` owns
the file and its rotation.
"""

import logging
import subprocess
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from resilient.logs.paths import DRIVER_LOG

KEPT_LINES = 10_000  # that nobody has taken: a command that starts or ends says a few
LAST_WORDS_S = 2.0  # for a run directory that does not answer at the end


class DriverLog(logging.Handler):
    """Lines with date and time; a handler of log records, too.

    Invariant: nothing goes to the file before `begin`, nor after `abandon`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._ours = False

    def note(self, text: str) -> None:
        """Something was said; what follows its first line is indented. From any thread, and from handlers of signals."""
        lines = "\n    ".join(text.rstrip().splitlines())
        self._lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {lines}\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.note(self.format(record))

    def begin(self) -> None:
        """The run directory is this command's."""
        self._ours = True

    def abandon(self) -> None:
        """The run directory is another command's."""
        self._ours = False

    def take(self) -> list[str]:
        """What was said since the last call, each text with its end."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._lines.popleft())
        return taken

    def finish(self, run_dir: Path) -> None:
        """Append what was said since the writer has ended. A run directory that does not answer is waited for only a moment.

        A process of its own writes: a thread that waits for a file system keeps the whole process from ending.
        """
        lines = "".join(self.take()).encode()
        if not lines or not self._ours:
            return
        command = ["/bin/sh", "-c", 'exec cat >> "$0"', str(run_dir / DRIVER_LOG)]
        with suppress(OSError, subprocess.TimeoutExpired):
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
            try:
                process.communicate(lines, LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                process.kill()  # it ends when the file system answers
                raise
