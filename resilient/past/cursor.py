"""A place in a file of the run directory that moves over its lines: one by one, or over a run of lines of steps at once.

Most lines of a long campaign tell of a step each. They are decoded by the block into small structures (`entries.step_metrics`,
`entries.step_events`), and only the others into dictionaries.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Generic, TypeVar, cast

from resilient import entries, ledger
from resilient.account import BEFORE, BEHIND, STEP, place_of
from resilient.entries import StepEvent, StepMetrics
from resilient.past.stream import Entry, Key, Position, Stream

T = TypeVar("T", StepMetrics, StepEvent)

_time_of = attrgetter("t")


class Cursor(Generic[T]):
    """Moves over the lines of a stream.

    Attributes:
        offset: of the next line; key: of the last one that it has moved over.
        torn: the last line, where it has no end; it is never moved over.

    Args:
        position: where to begin.
        are_events: the stream is the ledger.
        decode: lines into structures; None for a line that tells of no step.
    """

    def __init__(
        self, stream: Stream, position: Position, *, are_events: bool, decode: Callable[[Sequence[bytes]], list[T | None]]
    ) -> None:
        self._stream, self._are_events = stream, are_events
        self._decode: Callable[[Sequence[bytes]], list[T | None]] = decode
        self.offset, self.key = position.offset, (position.latest, BEFORE)
        self.torn: Entry | None = None
        self._lines: list[bytes] = []  # a block, and what they tell
        self._steps: list[T | None] = []
        self._others: list[int] = []  # which of them tell of no step
        self._in_order = True  # the times of steps in it
        self._at = self._run_end = 0  # in the block: the next line, and the first one that belongs to no run of steps from there on
        self._head: Entry | None = None
        self._behind: Entry | None = None  # the line at `_run_end`
        self._ended = False

    @property
    def head(self) -> Entry | None:
        """The next line; None at the end."""
        if self._head is None and not self._ended:
            self._head = self._entry(self._at, self.offset, self.key[0]) if self._filled() else self._lone()
            self._ended = self._head is None
        return self._head

    def take(self) -> None:
        """Move over the next line."""
        head = self.head
        assert head is not None
        self._at += self._at < len(self._lines)
        self._move(head.end, head.key)

    def bound(self) -> Key | None:
        """The key of the first line behind the steps that come next, or of the last of those where the file was not read so far;
        None: the file has nothing more."""
        if not self._find_run():
            return None if self.head is None else self.head.key
        latest = cast(T, self._steps[self._run_end - 1]).t
        last = latest, self._place
        if self._run_end == len(self._lines):
            return last
        if self._behind is None:
            size = sum(map(len, self._lines[self._at : self._run_end])) + self._run_end - self._at
            self._behind = self._entry(self._run_end, self.offset + size, latest)
        return max(last, self._behind.key)  # a `run_started` of the same time comes behind them all the same

    def steps(self, until: Key | None, most: int | None = None) -> list[T]:
        """The steps that come next and before a key. Args: most: so many of them."""
        if not self._find_run():
            return []
        run, end = cast(list[T], self._steps), self._run_end
        if until is not None:
            bisect = bisect_right if self._place < until[1] else bisect_left
            end = bisect(run, until[0], self._at, end, key=_time_of)
        return run[self._at : end if most is None else min(end, self._at + most)]

    def skip(self, count: int) -> None:
        """Move over so many of these steps."""
        begin, self._at = self._at, self._at + count
        size = sum(map(len, self._lines[begin : self._at])) + count
        self._move(self.offset + size, (cast(T, self._steps[self._at - 1]).t, self._place))

    @property
    def _place(self) -> int:
        return BEHIND if self._are_events else STEP

    def _move(self, offset: int, key: Key) -> None:
        self.offset, self.key, self._head = offset, key, None
        if self._at == self._run_end:
            self._head, self._behind = self._behind, None

    def _filled(self) -> bool:
        """Whether the next line is in the block, after reading on where it has to be."""
        if self._at == len(self._lines):
            self._lines = self._stream.block(self.offset)
            self._steps = self._decode(self._lines)
            self._others = [number for number, each in enumerate(self._steps) if each is None]
            times = [each.t for each in self._steps if each is not None]
            self._in_order = times == sorted(times)
            self._at = self._run_end = 0
        return self._at < len(self._lines)

    def _find_run(self) -> bool:
        """Whether the next line is a step, whose run is known then."""
        if self._ended or not self._filled():
            return False
        if self._run_end <= self._at:
            other = bisect_left(self._others, self._at)
            until = self._others[other] if other < len(self._others) else len(self._steps)
            run = cast(list[T], self._steps)
            self._run_end = self._at
            if until > self._at and run[self._at].t >= self.key[0]:
                self._run_end = until if self._in_order else _ascent(run, self._at, until)
        return self._at < self._run_end

    def _entry(self, number: int, offset: int, latest: float) -> Entry:
        """A line of the block. Args: offset: of its beginning; latest: of the times before it."""
        return self._made(self._lines[number], offset, offset + len(self._lines[number]) + 1, latest)

    def _lone(self) -> Entry | None:
        """The next line, which is not in a block: the last one, a very long one, or none."""
        line, end, is_whole = self._stream.line(self.offset)
        if end == self.offset:
            return None
        entry = self._made(line, self.offset, end, self.key[0])
        if not is_whole:
            self.torn = entry
        return entry if is_whole else None

    def _made(self, line: bytes, begin: int, end: int, latest: float) -> Entry:
        found, place = ledger.parsed(line), STEP
        is_valid = found is not None and (entries.is_event if self._are_events else entries.is_metrics)(found)
        if found is not None and is_valid:
            latest = max(latest, float(found["t"]))
            place = place_of(found) if self._are_events else STEP
        return Entry(begin, end, (latest, place), found, is_valid)


def _ascent(run: list[T], begin: int, end: int) -> int:
    """Up to where times do not go back from a line on."""
    return next((at for at in range(begin + 1, end) if run[at].t < run[at - 1].t), end)
