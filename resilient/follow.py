"""`resilient attach`: the live display of a campaign that another terminal, a job or another node has started.

Reads the run directory and nothing else; ending it ends nothing of the campaign.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from resilient import entries, ledger
from resilient.driver.display import Display, Seen, harmless, is_progress
from resilient.driver.lease import holder
from resilient.logs.paths import DRIVER_LOG
from resilient.processes import must_be_run_directory
from resilient.status import Summary, overview

POLL_S = 0.2
HOLDER_S = 1.0  # between two looks at whether a driver is there
SHOWN = 10  # lines of what was said before
BACK_BYTES = 1 << 14
READ_BYTES = 1 << 20
_STAMP = len("2026-01-31 12:00:00 ")


class Tail:
    """The whole lines that are appended to a file, also after it was moved aside and begun anew.

    Args:
        back_bytes: of what is there already.
    """

    def __init__(self, path: Path, back_bytes: int = 0) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._offset = 0
        self._open(back_bytes)

    def _open(self, back_bytes: int | None) -> None:
        """Args: back_bytes: None: from the beginning."""
        self.close()
        try:
            self._file = self._path.open("rb")
            size = os.fstat(self._file.fileno()).st_size
        except OSError:
            return
        self._offset = 0 if back_bytes is None else max(0, size - back_bytes)
        if self._offset:  # a line that began before is left out
            self._file.seek(self._offset - 1)
            self._offset += len(self._file.readline(READ_BYTES)) - 1

    def lines(self) -> Iterator[bytes]:
        """Those that have come since the last call, without their ends."""
        moved = self._file is None or self._moved(self._file)  # asked first: then nothing more comes to it
        while data := self._read():
            yield from data.splitlines()
        if moved:
            self._open(None)
            while data := self._read():
                yield from data.splitlines()

    def _read(self) -> bytes:
        """The next whole lines; a line that is longer than what is read at a time is one of several."""
        if self._file is None:
            return b""
        try:
            self._file.seek(self._offset)
            data = self._file.read(READ_BYTES)
        except OSError:
            return b""
        if len(data) < READ_BYTES or b"\n" in data:
            data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data

    def _moved(self, file: BinaryIO) -> bool:
        try:
            now, then = self._path.stat(), os.fstat(file.fileno())
        except OSError:
            return False  # it is being moved, or its file system is away
        return now.st_ino != then.st_ino or then.st_size < self._offset

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def follow(run_dir: Path) -> str:
    """Show a campaign until its driver has ended, or until Ctrl-C; what to say then.

    Raises:
        EnvironmentUnusable: there is no such campaign.
    """
    must_be_run_directory(run_dir)
    try:
        _follow(run_dir)
    except KeyboardInterrupt:
        return "detached: the campaign goes on without this display"
    return ending(overview(run_dir))


def _follow(run_dir: Path) -> None:
    said = Tail(run_dir / DRIVER_LOG, BACK_BYTES)
    metrics, events = Tail(run_dir / ledger.METRICS), Tail(run_dir / ledger.EVENTS)
    found = overview(run_dir)
    seen = Seen(found.step, found.loss, found.tokens_per_s, found.checkpoint_step, found.faults)
    display = Display("auto", found.target_step, console=Console(highlight=False), seen=seen)
    try:
        before = [line for line in map(_text, said.lines()) if not is_progress(line[_STAMP:])]
        for line in before[-SHOWN:]:
            display.print(line)
        _show(run_dir, display, said, metrics, events)
    finally:
        display.close()
        for tail in (said, metrics, events):
            tail.close()


def ending(found: Summary) -> str:
    """How a campaign is that no driver works on."""
    of = f" of {found.target_step}" if found.target_step is not None else ""
    return f"{found.name} does not run: {found.state} at step {found.step}{of}"


def _show(run_dir: Path, display: Display, said: Tail, metrics: Tail, events: Tail) -> None:
    """Until there is no driver, and all that it has written was shown."""
    looked_t, running = 0.0, True
    while running:
        if time.monotonic() - looked_t >= HOLDER_S:
            looked_t, running = time.monotonic(), holder(run_dir) is not None
        for text in map(_text, said.lines()):
            if not (display.live and is_progress(text[_STAMP:])):
                display.print(text)
        for line in _objects(events):
            if entries.is_event(line):
                display.count(line)
        for line in _objects(metrics):
            if display.live and entries.is_metrics(line):
                display.metrics(line)
        display.refresh()
        if running:
            time.sleep(POLL_S)


def _objects(tail: Tail) -> Iterator[dict[str, Any]]:
    return (found for line in tail.lines() if (found := ledger.parsed(line)) is not None)


def _text(line: bytes) -> str:
    """A line without what a terminal would act upon."""
    return harmless(line.decode(errors="replace").expandtabs())
