"""The ledger: `events.jsonl`, what happened to a campaign, one JSON object a line, append-only; and `metrics.jsonl` beside it.

Owns the two files' form. The driver is their only writer; anyone may read them at any time. A line that a crash cut short is
closed off by the next writer and skipped by readers.
"""

import contextlib
import json
import os
import socket
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from resilient import clock, entries, strict_json

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
LINE_BYTES = 16 << 20  # of a line that is read; what is longer is none of the project's
_SURROGATE = b"\\u"
SINCE_BYTES = 1 << 20
TAIL_BYTES = 8 << 20  # of a file that is opened, and as much as is appended: what a writer before may have left is looked for there


class AppendFile:
    """An append-only file of lines that other processes read at any time.

    Lines are whole, once and in order, whatever the file system does: after a write that failed, or of which only a part fitted,
    the file is cut back to its last whole line, or, where that fails, too, repaired before the next line is written.

    Invariant: while `_settled`, the file ends where the last append ended, as far as this process knows, and with a line's end.

    Args:
        path: of the file.
        create: whether it may be made; where it may not, a file that is missing is an error and not a new beginning.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self._path = path
        self._fd = -1
        self._end_bytes: int | None = None  # None: nothing was appended yet
        self._settled = False
        self._open(os.O_CREAT if create else 0)

    def _open(self, flag: int) -> None:
        self.close()
        self._fd = os.open(self._path, flag | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, lines: deque[bytes]) -> None:
        """Append whole lines, each with its end; takes from the left of `lines` what is in the file.

        Raises:
            OSError: what is left in `lines` is not in the file; the same call may be made again.
        """
        if not self._settled:
            self._settle(lines)
        data = memoryview(b"".join(lines))
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError:
            self._settled = False
            self._cut(done, lines)
            raise
        if data:
            lines.clear()
            self._end_bytes = os.lseek(self._fd, 0, os.SEEK_CUR)

    @property
    def end_bytes(self) -> int:
        """How long the file is, as far as this process knows."""
        return self._end_bytes or 0

    @property
    def is_deleted(self) -> bool:
        """Whether what is written would go where nobody finds it."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def unsettle(self) -> None:
        """The file may be another one by now, or have another end: look before the next line is written."""
        self._settled = False

    def _cut(self, done: int, lines: deque[bytes]) -> None:
        """`done` bytes of the lines were written: take the whole ones, and cut off the rest of the last."""
        if not done:
            return
        while lines and done >= len(lines[0]):
            done -= len(lines.popleft())
        with contextlib.suppress(OSError):
            position = os.lseek(self._fd, 0, os.SEEK_CUR)
            self._end_bytes = position - done
            if os.fstat(self._fd).st_size == position:  # nobody else has appended since
                os.ftruncate(self._fd, self._end_bytes)

    def _settle(self, lines: deque[bytes]) -> None:
        """Find out what is in the file, drop lines that are in it already, and see to it that it ends with a line's end."""
        if self._end_bytes is not None:
            self._open(0)
        size = os.fstat(self._fd).st_size
        start = self._end_bytes
        if start is None or start > size:
            start = max(0, size - TAIL_BYTES - sum(map(len, lines)))
        keep, left, cut_short = missing(_read_from(self._fd, start), lines)
        if start + keep < size:
            os.ftruncate(self._fd, start + keep)
        elif cut_short:
            os.write(self._fd, b"\n")
        self._end_bytes = start + keep + cut_short
        lines.clear()
        lines.extend(left)
        self._settled = True

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def missing(tail: bytes, lines: Iterable[bytes]) -> tuple[int, list[bytes], bool]:
    """Compare the end of a file with lines that are to be in it.

    Args:
        tail: from the start of a line, or from within one that is not looked for.
        lines: in order, each with its end.

    Returns:
        How many bytes of the tail stay: all, unless it ends with the beginning of one of the lines; the lines that are not in it;
        and whether what stays ends within a line.
    """
    *whole, rest = tail.split(b"\n")
    known = Counter(whole)
    left = []
    for line in lines:
        if known[line[:-1]] > 0:
            known[line[:-1]] -= 1
        else:
            left.append(line)
    if rest and any(line.startswith(rest) for line in left):
        return len(tail) - len(rest), left, False
    return len(tail), left, bool(rest)


def _read_from(fd: int, start: int) -> bytes:
    """All from an offset to the end of the file."""
    parts = []
    while part := os.pread(fd, 1 << 20, start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def encoded(entry: Mapping[str, object]) -> bytes:
    """An entry as its line. Numbers that JSON does not know are null in it."""
    return (strict_json.dumps(entry, separators=(", ", ": "), default=str) + "\n").encode()


def event_entry(
    event: str, fields: Mapping[str, object], *, generation: int, t: float | None = None, host: str | None = None
) -> dict[str, object]:
    """An event as it stands in the ledger; `t` None for now, `host` None for this one."""
    return {
        "t": clock.now() if t is None else t,
        "event": event,
        "generation": generation,
        "host": socket.gethostname() if host is None else host,
        **fields,
    }


def metrics_entry(fields: Mapping[str, object], *, generation: int, t: float) -> dict[str, object]:
    """A line of metrics as it stands in the file."""
    return {**fields, "generation": generation, "t": t}


class JsonLines:
    """An append-only file of JSON objects. A reader sees whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)

    def append(self, entry: Mapping[str, object]) -> None:
        """Raises OSError: the entry is not in the file."""
        self._file.append(deque([encoded(entry)]))

    def close(self) -> None:
        self._file.close()


class Ledger:
    """The two files of one run directory, open for writing.

    Args:
        run_dir: an existing directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._events = JsonLines(run_dir / EVENTS)
        self._metrics = JsonLines(run_dir / METRICS)

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
        line = event_entry(event, fields, generation=generation, t=t, host=host)
        self._events.append(line)
        return line

    def metrics(self, fields: Mapping[str, object], *, generation: int, t: float) -> dict[str, object]:
        """Append a line of metrics; returns it as it was written."""
        line = metrics_entry(fields, generation=generation, t=t)
        self._metrics.append(line)
        return line

    def close(self) -> None:
        self._events.close()
        self._metrics.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read(path: Path, begin: int = 0) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, in order, after those of its parts that were moved aside; nothing if there is no file.

    Lines that are not whole, or longer than any that is written, are skipped. What is in an object is anybody's word.

    Args:
        begin: offset of the first line, from the beginning of the oldest part.
    """
    for part in parts(path):
        try:
            file = part.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            continue
        with file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(begin, size))
            begin = max(0, begin - size)
            whole = True  # whether the next line begins where the last read ended
            while line := file.readline(LINE_BYTES):
                began, whole = whole, line.endswith(b"\n")
                entry = parsed(line) if began else None
                if entry is not None:
                    yield entry


def since(path: Path, t: float) -> list[dict[str, Any]]:
    """The objects at the end of a JSON-lines file, in order: at least those after the last `SINCE_BYTES` whose lines are all older.

    Parts of it that were moved aside belong to it.

    Args:
        t: unix seconds.
    """
    found: deque[dict[str, Any]] = deque()
    for block in _blocks_backwards(path):
        found.extendleft(reversed(block))
        times = [entry["t"] for entry in block if isinstance(entry.get("t"), int | float)]
        if times and max(times) < t:
            break
    return list(found)


def _blocks_backwards(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The objects of a file in blocks, each in order, the last block first."""
    for part in reversed(parts(path)):
        try:
            file = part.open("rb")
        except FileNotFoundError:
            continue
        with file:
            end = os.fstat(file.fileno()).st_size
            rest = b""  # of a line that begins before it
            while end:
                begin = max(0, end - SINCE_BYTES)
                data = os.pread(file.fileno(), end - begin, begin) + rest
                rest, *lines = data.split(b"\n") if begin else [b"", *data.split(b"\n")]
                yield [entry for line in lines if (entry := parsed(line)) is not None]
                end = begin


def parts(path: Path) -> list[Path]:
    """A file and the parts of it that were moved aside, the oldest first: `.2`, `.1`, and the file itself."""
    aside: list[Path] = []
    while (part := path.with_name(f"{path.name}.{len(aside) + 1}")).exists():
        aside.append(part)
    return [*reversed(aside), path]


def parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, if it is one."""
    try:
        found = msgspec.json.decode(line)
    except (ValueError, RecursionError):  # where the standard library may still read it: NaN, bytes that are no text
        try:
            found = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):  # numbers of too many digits are a ValueError, too
            return None
    if not isinstance(found, dict):
        return None
    return _printable(found) if _SURROGATE in line else found


def _printable(value: Any) -> Any:
    """The same without halves of characters, which JSON can name, and no terminal and no file takes."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return {_printable(name): _printable(each) for name, each in value.items()} if isinstance(value, dict) else value


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger that have what their events have."""
    return entries.events(read(path))


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics that have what metrics have."""
    return entries.metrics(read(path))
