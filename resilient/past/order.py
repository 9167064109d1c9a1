"""The lines of both files of a run directory in one order, and how far that order is final.

Lines are merged by their times, which never go back within a file. As long as both files have a next line, the order is final: what
is appended later comes after. Where one of them has none, the lines of the other are *ahead*: a line of the first may still come
between them. A `Mark` is the past up to one place of that order; `brought_up` goes on from the best that fits, so that the past is
the same wherever it was read before.
"""

import msgspec

from checkpoint.typed import built
from resilient import entries
from resilient.entries import StepEvent, StepMetrics
from resilient.past.cursor import Cursor
from resilient.past.fold import Past
from resilient.past.stream import Entry, Key, Position, Stream

AHEAD_S = 60.0  # a line that comes later than that is rare
AHEAD_LINES = 2000

AnyCursor = Cursor[StepEvent] | Cursor[StepMetrics]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(built(Past))


class Mark(msgspec.Struct, frozen=True):
    """The past up to a place.

    Attributes:
        past: encoded.
        last: the key of the last line that is in it and was ahead; None: none was.
    """

    past: bytes
    events: Position
    metrics: Position
    last: Key | None = None


class Marks(msgspec.Struct, frozen=True):
    """Attributes: final: everything in it is in its final order; ahead: one that is further, and may have to be given up."""

    final: Mark
    ahead: Mark | None = None


def beginning() -> Marks:
    """Nothing was read yet."""
    return Marks(Mark(_encoder.encode(Past()), Position(), Position()))


def decoded_past(mark: Mark) -> Past:
    """The past of a mark. Raises ValueError where it is none."""
    return _decoder.decode(mark.past)


def fitting(marks: Marks, events: Stream, metrics: Stream) -> Marks:
    """What of them is true of these files."""

    def fits(mark: Mark) -> bool:
        return events.fits(mark.events) and metrics.fits(mark.metrics)

    if not fits(marks.final):
        return beginning()
    return marks if marks.ahead is None or fits(marks.ahead) else Marks(marks.final)


def brought_up(marks: Marks, events: Stream, metrics: Stream) -> tuple[Marks, Past]:
    """The past up to the end of both files, and marks to go on from. Args: marks: that fit."""
    if marks.ahead is not None:
        work = _Work(marks.ahead, events, metrics)
        if work.nothing_between:
            return work.to_the_end(marks.final)
    return _Work(marks.final, events, metrics).to_the_end(None)


class _Work:
    """Goes on from a mark."""

    def __init__(self, mark: Mark, events: Stream, metrics: Stream) -> None:
        self._past = decoded_past(mark)
        self._mark = mark
        self._streams = events, metrics
        self._events = Cursor(events, mark.events, are_events=True, decode=entries.step_events)
        self._metrics = Cursor(metrics, mark.metrics, are_events=False, decode=entries.step_metrics)

    @property
    def nothing_between(self) -> bool:
        """Whether no line has come that belongs before the last one of what was ahead."""
        last = self._mark.last
        heads = self._events.head, self._metrics.head
        return last is None or all(head is None or head.key > last for head in heads)

    def to_the_end(self, final: Mark | None) -> tuple[Marks, Past]:
        """Args: final: the mark from which on everything may be in another order, if it lies before this one."""
        both = self._events.head is not None and self._metrics.head is not None
        while (event_bound := self._events.bound()) is not None and (metrics_bound := self._metrics.bound()) is not None:
            if self._take_steps(event_bound, metrics_bound):
                continue
            first, second = self._events.head, self._metrics.head
            assert first is not None and second is not None
            self._take(self._events if first.key <= second.key else self._metrics)
        if final is None or both:
            final = self._marked(None)
            ahead: list[tuple[float, Mark]] = []
        else:
            ahead = [(self._mark.last[0], self._mark)] if self._mark.last is not None else []
        marks = Marks(final, self._go_ahead(ahead))
        for cursor in (self._events, self._metrics):  # the writer may have written all but the line's end
            if cursor.torn is not None:
                self._fold(cursor, cursor.torn)
        return marks, self._past

    def _take_steps(self, event_bound: Key | None, metrics_bound: Key | None, most: int | None = None) -> int:
        """Take the steps of both files that come before everything else; how many lines that were."""
        events, metrics = self._events.steps(metrics_bound, most), self._metrics.steps(event_bound, most)
        if events:
            self._events.skip(len(events))
        if metrics:
            self._metrics.skip(len(metrics))
        if events or metrics:
            self._past.steps(metrics, events)
        return len(events) + len(metrics)

    def _go_ahead(self, ahead: list[tuple[float, Mark]]) -> Mark | None:
        """Take the rest of the file that has one; the last mark in it that is old enough."""
        count, key = 0, None
        for cursor in (self._events, self._metrics):
            while cursor.bound() is not None:
                if count and key is not None and count % AHEAD_LINES == 0:
                    ahead.append((key[0], self._marked(key)))
                    while len(ahead) > 1 and ahead[1][0] <= key[0] - AHEAD_S:
                        del ahead[0]
                count += self._take_steps(None, None, AHEAD_LINES - count % AHEAD_LINES) or self._take(cursor)
                key = cursor.key
        until = [mark for t, mark in ahead if key is None or t <= key[0] - AHEAD_S]
        return until[-1] if until else None

    def _take(self, cursor: AnyCursor) -> int:
        """Take the next line of a file: one."""
        entry = cursor.head
        assert entry is not None
        self._fold(cursor, entry)
        cursor.take()
        return 1

    def _fold(self, cursor: AnyCursor, entry: Entry) -> None:
        if entry.found is None:
            return
        if cursor is self._events:
            self._past.event(entry.found, entry.begin, valid=entry.valid)
        else:
            self._past.metrics(entry.found, valid=entry.valid)

    def _marked(self, last: Key | None) -> Mark:
        return Mark(_encoder.encode(self._past), self._position(0), self._position(1), last)

    def _position(self, file: int) -> Position:
        cursor = (self._events, self._metrics)[file]
        head = cursor.head
        seen = cursor.offset if head is None else head.end
        return Position(cursor.offset, cursor.key[0], seen, self._streams[file].proof(seen))
