"""The ledger: `events.jsonl`, what happened to a campaign, one JSON object a line, append-only; and `metrics.jsonl` beside it.

Owns the two files' form. The driver is their only writer; anyone may read them at any time. A line that a crash cut short is
closed off by the next writer and skipped by readers.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from resilient import clock

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"


class JsonLines:
    """An append-only file of JSON objects. Each line is one `write`, so a reader sees whole lines or none."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, entry: Mapping[str, object]) -> None:
        line = json.dumps(entry, separators=(", ", ": "), default=str) + "\n"
        os.write(self._fd, line.encode())

    def close(self) -> None:
        os.close(self._fd)


class Ledger:
    """The two files of one run directory, open for writing.

    Args:
        run_dir: an existing directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._events = JsonLines(run_dir / EVENTS)
        self._metrics = JsonLines(run_dir / METRICS)
        self._host = socket.gethostname()

    def event(
        self,
        event: str,
        fields: Mapping[str, object],
        *,
        generation: int,
        t: float | None = None,
        host: str | None = None,
    ) -> dict[str, object]:
        """Append an event; returns the line as it was written."""
        line = {
            "t": clock.now() if t is None else t,
            "event": event,
            "generation": generation,
            "host": self._host if host is None else host,
            **fields,
        }
        self._events.append(line)
        return line

    def metrics(self, fields: Mapping[str, object], *, generation: int, t: float) -> dict[str, object]:
        """Append a line of metrics; returns it as it was written."""
        line = {**fields, "generation": generation, "t": t}
        self._metrics.append(line)
        return line

    def close(self) -> None:
        self._events.close()
        self._metrics.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, in order; nothing if there is no file. Lines that are not whole are skipped."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(entry, dict):
                yield entry


def last_generation(run_dir: Path) -> int:
    """The highest generation that the ledger names; 0 before the first."""
    return max((int(entry.get("generation", 0)) for entry in read(run_dir / EVENTS)), default=0)
