"""The lines of a file of the run directory from an offset on, as one stream with those parts of it that were moved aside.

`events.jsonl.1` is the part before `events.jsonl`, `.2` the one before that. Offsets count from the beginning of the oldest part,
so that a file that is moved aside changes none of them.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from resilient import entries, ledger
from resilient.account import STEP, place_of

SAMPLE_BYTES = 4096

Key = tuple[float, int]
"""The place of a line among those of both files: a time that never goes back within a file, and the order at the same time."""


@dataclass(frozen=True)
class Position:
    """Between two lines.

    Attributes:
        offset: of the next one.
        latest: of the times of those before, unix seconds.
        seen: up to where the file was read to know that nothing comes before the position.
        proof: of what lies before that; see `Stream.proof`.
    """

    offset: int = 0
    latest: float = 0.0
    seen: int = 0
    proof: bytes = b""


class Entry(NamedTuple):
    """A line.

    Attributes:
        begin, end: offsets.
        found: its JSON object, if it is one; valid: and has what such a line must have.
        whole: the line has its end.
    """

    begin: int
    end: int
    key: Key
    found: dict[str, Any] | None
    valid: bool
    whole: bool


class Stream:
    """A file that is read while others append to it; what is appended after it was opened is not seen.

    Args:
        path: of a file of JSON lines; nothing is in one that does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._are_events = path.name == ledger.EVENTS
        self._is_valid = entries.is_event if self._are_events else entries.is_metrics
        self._parts: list[tuple[int, int, BinaryIO]] = []  # begin, end
        self._stack = ExitStack()
        begin = 0
        for part in ledger.parts(path):
            try:
                file = self._stack.enter_context(part.open("rb"))
            except FileNotFoundError:
                continue
            end = begin + os.fstat(file.fileno()).st_size
            self._parts.append((begin, end, file))
            begin = end
        self._end = begin

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def lines(self, position: Position) -> Iterator[Entry]:
        """The lines from a position on; the last one may not be whole."""
        latest = position.latest
        for begin, end, file in self._parts:
            if end <= position.offset:
                continue
            at = max(begin, position.offset)
            file.seek(at - begin)
            while at < end and (line := file.readline(min(ledger.LINE_BYTES, end - at))):
                after = at + len(line)
                found, is_whole, place = ledger.parsed(line), line.endswith(b"\n"), STEP
                if not is_whole and after < end:  # it is longer than any that is written
                    found, (after, is_whole) = None, _rest(file, after, end)
                is_valid = found is not None and self._is_valid(found)
                if found is not None and is_valid:
                    latest = max(latest, float(found["t"]))
                    place = place_of(found) if self._are_events else STEP
                yield Entry(at, after, (latest, place), found, is_valid, is_whole or end != self._end)
                at = after

    def proof(self, offset: int) -> bytes:
        """What shows that a file is the same up to an offset, if it is one that is only ever appended to: the hash of both ends."""
        size = min(SAMPLE_BYTES, offset)
        return hashlib.sha256(self._bytes(0, size) + self._bytes(offset - size, offset)).digest()

    def fits(self, position: Position) -> bool:
        """Whether the position is one of this file."""
        return position.seen <= self._end and (not position.seen or self.proof(position.seen) == position.proof)

    def _bytes(self, begin: int, end: int) -> bytes:
        found = b""
        for part_begin, part_end, file in self._parts:
            if part_begin < end and part_end > begin:
                first = max(begin, part_begin)  # not by the file's own offset, which is that of a line
                found += os.pread(file.fileno(), min(end, part_end) - first, first - part_begin)
        return found


def _rest(file: BinaryIO, at: int, end: int) -> tuple[int, bool]:
    """Read on to the end of a line: where that is, and whether the line has one."""
    while at < end and (piece := file.readline(min(ledger.LINE_BYTES, end - at))):
        at += len(piece)
        if piece.endswith(b"\n"):
            return at, True
    return at, False
