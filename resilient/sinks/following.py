"""Reading a file of lines that grows, from an offset on; and what all lines of a run directory come to, in a thread of its own."""

import copy
import os
import threading
from pathlib import Path

from resilient import clock, entries, ledger
from resilient.ledger import EVENTS, LINE_BYTES, METRICS
from resilient.sinks.base import Line
from resilient.sinks.totals import RollingAccount, Totals

READ_BYTES = 1 << 20


class LineFile:
    """The lines of `events.jsonl` or `metrics.jsonl` from an offset on, as far as they are entries.

    Args:
        at_bytes: where to begin; the next line's beginning is looked for there.
    """

    def __init__(self, path: Path, at_bytes: int = 0) -> None:
        self._path = path
        self.name = path.name
        self.at_bytes = at_bytes
        self._fits = entries.is_event if path.name == EVENTS else entries.is_metrics
        self._begins = at_bytes == 0  # whether a line is known to begin there

    def read(self) -> list[Line]:
        """The next lines, of about a mebibyte; none if there are none yet. Raises OSError."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            if self.at_bytes > os.fstat(fd).st_size:
                return []  # what was there before a crash is not there again yet
            if not self._begins and self.at_bytes:
                self._begins = os.pread(fd, 1, self.at_bytes - 1) == b"\n"
            data = os.pread(fd, READ_BYTES, self.at_bytes)
            while b"\n" not in data and len(data) < LINE_BYTES and (more := os.pread(fd, READ_BYTES, self.at_bytes + len(data))):
                data += more
        finally:
            os.close(fd)
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= LINE_BYTES:  # no line of the project's
            self.at_bytes += len(data)
            self._begins = False
        return [line for line in map(self._line, data[:end].splitlines(keepends=True)) if line is not None]

    def _line(self, text: bytes) -> Line | None:
        self.at_bytes += len(text)
        whole, self._begins = self._begins, True
        entry = ledger.parsed(text) if whole else None
        return Line(self._path.name, self.at_bytes, entry) if entry is not None and self._fits(entry) else None


class TotalsReader:
    """Follows both files from their beginnings for whoever asks; used by several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._files = {name: LineFile(run_dir / name) for name in (EVENTS, METRICS)}
        self._totals = Totals()
        self._account = RollingAccount()
        self._lock = threading.Lock()

    def __call__(self) -> Totals:
        """What all lines come to that are there now; a copy. Raises OSError: the files cannot be read."""
        with self._lock:
            self._catch_up()
            now = clock.now() if self._totals.running else None
            self._totals.rank_seconds, self._totals.goodput = self._account.seconds(now)
            return copy.deepcopy(self._totals)

    def _catch_up(self) -> None:
        """Read what has come, the file first that lies behind, so that little has to be kept to put it in order."""
        behind = dict(self._files)
        while behind:
            name = min(behind, key=self._account.newest_t.__getitem__)
            before = behind[name].at_bytes
            for line in behind[name].read():
                self._totals.take(line.entry)
                self._account.take(line.entry, name)
            if behind[name].at_bytes == before:
                del behind[name]
            else:
                self._account.settle(all_read=False)
