"""Writes the past of the campaign (`resilient.past`) while a job writes its ledger: in a thread of the disk process.

The thread alone may stand still because the run directory does, and nobody waits for it but for a moment at the end. What it cannot
write it tries again later: the file only saves others time, so that trouble with it is none of the job's.
"""

import logging
import threading
import time
from pathlib import Path

from resilient.driver.lease import must_be_there
from resilient.past.record import Reader

log = logging.getLogger(__name__)

KEEP_S = 30.0  # between two times that the file is written


class PastWriter:
    """Args: every_s: at most so often."""

    def __init__(self, run_dir: Path, every_s: float = KEEP_S) -> None:
        self._run_dir = run_dir
        self._every_s = every_s
        self._due = threading.Event()  # there is something new
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="past", daemon=True)
        self._thread.start()

    def written(self) -> None:
        """Lines were written."""
        self._due.set()

    def finish(self, patience_s: float) -> None:
        """Keep what there is, unless that takes too long; then no more."""
        self._ending.set()
        self._due.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            reader = Reader(self._run_dir)
            while True:
                self._due.wait()
                self._due.clear()
                is_last = self._ending.is_set()
                began_t = time.monotonic()
                try:
                    must_be_there(self._run_dir)  # or it would all be read again, once it is there
                    reader.read()
                    reader.keep()
                except OSError as error:
                    log.info("the past of %s could not be kept: %s", self._run_dir, error)
                if is_last:
                    return
                self._ending.wait(self._every_s + 10 * (time.monotonic() - began_t))
        except Exception:
            log.exception("a defect: the past of %s is not kept any more", self._run_dir)
