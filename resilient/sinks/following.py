"""Reading a file of lines that grows, from an offset on; and what all lines of a run directory come to, in a thread of its own."""

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilient import clock, entries, ledger
from resilient.ledger import EVENTS, LINE_BYTES, METRICS
from resilient.past.stream import Stream
from resilient.sinks.base import Line
from resilient.sinks.totals import RollingAccount, Totals

log = logging.getLogger(__name__)


class LineFile:
    """The lines of `events.jsonl` or `metrics.jsonl` from an offset on, as far as they are entries.

    Offsets count from the beginning of the oldest part that was moved aside. A file that has lost its end is waited for, and lines
    that have come in place of the end are read.

    Args:
        at_bytes: where to begin; the next line's beginning is looked for there.
        newest_t: see below.

    Attributes:
        at_bytes: where the next line begins.
        newest_t: the latest of the times of those before, unix seconds; None: not known.
    """

    def __init__(self, path: Path, at_bytes: int = 0, newest_t: float | None = None) -> None:
        self._path = path
        self.name = path.name
        self.at_bytes = at_bytes
        self.newest_t = newest_t
        self._is_where_it_was = at_bytes == 0  # whether the offset is known to be one of the file as it is
        self._fits = entries.is_event if path.name == EVENTS else entries.is_metrics
        self._begins = at_bytes == 0  # whether a line is known to begin there

    def read(self) -> list[Line]:
        """The next lines, of about a mebibyte; none if there are none yet. Raises OSError."""
        with Stream(self._path) as stream:
            self._is_where_it_was = self._is_where_it_was and self.at_bytes <= stream.end
            if not self._is_where_it_was:
                self._go_back(stream)
            if self.at_bytes > stream.end:
                return []  # what was there before a crash is not there again yet
            self._is_where_it_was = True
            self._begins = self._begins or stream.begins(self.at_bytes)
            texts = stream.block(self.at_bytes)
            if texts:
                return [line for text in texts if (line := self._line(text, self.at_bytes + len(text) + 1)) is not None]
            text, end, is_whole = stream.line(self.at_bytes)
        if end == self.at_bytes or (not is_whole and end - self.at_bytes < LINE_BYTES):
            return []
        line = self._line(text, end)
        self._begins = is_whole  # one that is longer than any of the project's may go on
        return [line] if line is not None else []

    def _go_back(self, stream: Stream) -> None:
        """To the first line before the offset that is later than all that were read; nowhere if there is none."""
        first = None
        for begin, text in stream.back(min(self.at_bytes, stream.end)) if self.newest_t is not None else ():
            entry = self._entry(text)
            if entry is not None and entry["t"] <= self.newest_t:
                break
            first = begin if entry is not None else first
        if first is not None:
            log.warning("%s has lost lines that were read; read on at byte %d, not %d", self._path, first, self.at_bytes)
            self.at_bytes, self._begins = first, True

    def _line(self, text: bytes, end: int) -> Line | None:
        """Move over a line. Args: end: where it ends."""
        self.at_bytes = end
        whole, self._begins = self._begins, True
        entry = self._entry(text) if whole else None
        if entry is None:
            return None
        self.newest_t = entry["t"] if self.newest_t is None else max(entry["t"], self.newest_t)
        return Line(self._path.name, end, entry)

    def _entry(self, text: bytes) -> dict[str, Any] | None:
        entry = ledger.parsed(text)
        return entry if entry is not None and self._fits(entry) else None


class TotalsReader:
    """Follows both files from their beginnings for whoever asks; used by several threads.

    Args:
        alive: whether the driver is there: one that was killed has said of no end.
    """

    def __init__(self, run_dir: Path, alive: Callable[[], bool]) -> None:
        self._alive = alive
        self._files = {name: LineFile(run_dir / name) for name in (EVENTS, METRICS)}
        self._totals = Totals()
        self._account = RollingAccount()
        self._lock = threading.Lock()

    def __call__(self) -> Totals:
        """What all lines come to that are there now; a copy. Raises OSError: the files cannot be read."""
        with self._lock:
            self._catch_up()
            found = copy.deepcopy(self._totals)
            found.running = found.running and self._alive()
            found.rank_seconds, found.goodput = self._account.seconds(clock.now() if found.running else None)
            return found

    def _catch_up(self) -> None:
        """Read what has come, the file first that lies behind, so that little has to be kept to put it in order."""
        behind = dict(self._files)
        while behind:
            name = min(behind, key=self._account.newest_t.__getitem__)
            before = behind[name].at_bytes
            for line in behind[name].read():
                self._take(line)
            if behind[name].at_bytes == before:
                del behind[name]
            else:
                self._account.settle(all_read=False)

    def _take(self, line: Line) -> None:
        """The next line. One whose numbers are beyond all bounds does not count, and those behind it do."""
        try:
            self._totals.take(line.entry)
            self._account.take(line.entry, line.file)
        except ArithmeticError as error:
            log.warning("the line of %s that ends at byte %d does not count: %s", line.file, line.end_bytes, error)
