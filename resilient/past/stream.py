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

from resilient import ledger

SAMPLE_BYTES = 4096
BLOCK_BYTES = 1 << 20  # that are read at once

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
    """

    begin: int
    end: int
    key: Key
    found: dict[str, Any] | None
    valid: bool


class Stream:
    """A file that is read while others append to it; what is appended after it was opened is not seen.

    Args:
        path: of a file of JSON lines; nothing is in one that does not exist.
    """

    def __init__(self, path: Path) -> None:
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

    @property
    def end(self) -> int:
        """Offset of the end of the file."""
        return self._end

    def begins(self, offset: int) -> bool:
        """Whether a line begins there; a part that was moved aside ends its last line."""
        return any(begin == offset for begin, *_ in self._parts) or self._bytes(offset - 1, offset) == b"\n"

    def block(self, offset: int) -> list[bytes]:
        """Whole lines from the beginning of one on, without their ends; none where the next one is not whole, or very long."""
        for begin, end, file in self._parts:
            if begin <= offset < end:
                data = os.pread(file.fileno(), min(BLOCK_BYTES, end - offset), offset - begin)
                return data.split(b"\n")[:-1]
        return []

    def line(self, offset: int) -> tuple[bytes, int, bool]:
        """The line that begins there, where it ends, and whether it has its end; empty where it is longer than any that is written,
        or there is none."""
        for begin, end, file in self._parts:
            if not begin <= offset < end:
                continue
            file.seek(offset - begin)
            line = file.readline(min(ledger.LINE_BYTES, end - offset))
            after, is_whole = offset + len(line), line.endswith(b"\n")
            if not is_whole and after < end:
                line, (after, is_whole) = b"", _rest(file, after, end)
            return line, after, is_whole or end != self._end
        return b"", offset, True

    def back(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """The lines before an offset, the last one first, each with where it begins; none before one longer than a block."""
        while offset > 0:
            begin = max(0, offset - BLOCK_BYTES)
            lines = self._bytes(begin, offset).split(b"\n")[begin > 0 :]  # the first one may begin before the block
            if not lines:
                return
            for line in reversed(lines):
                offset -= len(line)
                yield offset, line
                offset -= 1

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
