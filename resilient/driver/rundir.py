"""The files of a run directory that a job appends to, as its disk process has them open.

Owns events.jsonl, metrics.jsonl, driver.log and its rotation, and how texts are written. Belongs to one thread, which may stand
still in any call. Every method may be called again after an OSError: nothing is written twice, and nothing is left out.
"""

import errno
import json
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.errors import AWAY
from resilient import ledger
from resilient.driver.lease import must_be_there
from resilient.driver.spill_file import replace_text
from resilient.driver.tensorboard import ScalarFile
from resilient.ledger import AppendFile
from resilient.logs.paths import DRIVER_LOG
from resilient.protocol.disk import Item

log = logging.getLogger(__name__)

LOG_BYTES = 4 << 20  # of driver.log, before it is moved aside
OLD_LOGS = 4

# What another try may find mended. A text with any other error is given up, and a line of driver.log is; other lines never.
_PASSING = AWAY | {errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ENODEV, errno.ENXIO}


class RunDirFiles:
    """Args:
    scalars: gets the numbers of the lines that are written; None: nobody does.
    lock_fd: the run directory's lock, which tells it from another one in its place.
    """

    def __init__(self, run_dir: Path, scalars: ScalarFile | None, lock_fd: int | None = None) -> None:
        self._run_dir = run_dir
        self._lock_fd = lock_fd
        self._scalars = scalars
        self._files: dict[str, AppendFile] = {}
        self._is_there = False  # as far as is known since a file system has failed

    def write(self, items: deque[Item]) -> None:
        """Write items in order; takes from the left of `items` what is in the run directory. Raises OSError."""
        while items:
            if items[0].whole:
                self._write_text(items[0])
                items.popleft()
                continue
            run = []
            for item in items:
                if item.whole or item.path != items[0].path:
                    break
                run.append(item)
            pending = deque(item.text.encode() for item in run)
            try:
                self._append(run[0].path, pending)
            finally:
                for _ in run[: len(run) - len(pending)]:
                    item = items.popleft()
                    self._count(item.path, item.text)

    def _write_text(self, item: Item) -> None:
        try:
            must_be_there(self._run_dir, self._lock_fd)
            replace_text(self._run_dir / item.path, item.text)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            log.warning("%s could not be written: %s", item.path, error)

    def _append(self, name: str, lines: deque[bytes]) -> None:
        try:
            file = self._files.get(name)
            if file is not None and file.is_deleted:
                self._close_deleted(name)
                file = None
            if file is None or not self._is_there:
                must_be_there(self._run_dir, self._lock_fd)
                self._is_there = True
            if file is None:
                file = self._files[name] = AppendFile(self._run_dir / name)
            file.append(lines)
        except FileNotFoundError:
            if name in self._files:
                must_be_there(self._run_dir, self._lock_fd)
                self._close_deleted(name)  # the next try opens a new one
            raise
        except OSError as error:
            if name != DRIVER_LOG or error.errno in _PASSING:
                raise
            log.warning("%s could not be written: %s", name, error)
            lines.clear()
        else:
            if name == DRIVER_LOG and file.end_bytes >= LOG_BYTES:
                self._move_log_aside()

    def _close_deleted(self, name: str) -> None:
        log.warning("%s was deleted; what comes is written to a new one", self._run_dir / name)
        self._files.pop(name).close()

    def _move_log_aside(self) -> None:
        """driver.log becomes driver.log.1, and so on; the oldest goes. What cannot be done now can with the next line."""
        path = self._run_dir / DRIVER_LOG
        with suppress(OSError):
            for number in range(OLD_LOGS - 1, 0, -1):
                with suppress(FileNotFoundError):
                    path.with_name(f"{DRIVER_LOG}.{number}").replace(path.with_name(f"{DRIVER_LOG}.{number + 1}"))
            path.replace(path.with_name(f"{DRIVER_LOG}.1"))
            self._files.pop(DRIVER_LOG).close()

    def _count(self, path: str, text: str) -> None:
        if self._scalars is None:
            return
        if path == ledger.METRICS:
            self._scalars.metrics(json.loads(text))
        elif path == ledger.EVENTS and '"event": "validation"' in text:
            self._scalars.event(json.loads(text))

    def event(self, event: str, fields: Mapping[str, Any], *, generation: int, t: float, host: str) -> None:
        """Append an event that somebody has left. Raises OSError."""
        self._append(
            ledger.EVENTS, deque([ledger.encoded(ledger.event_entry(event, fields, generation=generation, t=t, host=host))])
        )

    def metrics(self, fields: Mapping[str, Any], *, generation: int, t: float) -> None:
        """Append a line of metrics that somebody has left. Raises OSError."""
        self._append(ledger.METRICS, deque([ledger.encoded(ledger.metrics_entry(fields, generation=generation, t=t))]))

    def unsettle(self) -> None:
        """The file system has failed: files may be others by now."""
        self._is_there = False
        for file in self._files.values():
            file.unsettle()

    def close(self) -> None:
        """Raises OSError."""
        while self._files:
            self._files.popitem()[1].close()
