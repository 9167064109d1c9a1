"""The lines of both files of a run directory in one order, and how far that order is final.

Lines are merged by their times, which never go back within a file. As long as both files have a next line, the order is final: what
is appended later comes after. Where one of them has none, the lines of the other are *ahead*: a line of the first may still come
between them. A `Mark` is the past up to one place of that order; `brought_up` goes on from the best that fits, so that the past is
the same wherever it was read before.
"""

from collections.abc import Iterator

import msgspec

from checkpoint.typed import built
from resilient.past.fold import Past
from resilient.past.stream import Entry, Key, Position, Stream

AHEAD_S = 60.0  # a line that comes later than that is rare
AHEAD_LINES = 2000

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
        self._at = [(at.offset, at.latest) for at in (mark.events, mark.metrics)]
        self._lines: tuple[Iterator[Entry], Iterator[Entry]] = events.lines(mark.events), metrics.lines(mark.metrics)
        self._torn: list[tuple[int, Entry]] = []
        self._heads = [self._next(0), self._next(1)]

    def _next(self, file: int) -> Entry | None:
        entry = next(self._lines[file], None)
        if entry is not None and not entry.whole:
            self._torn.append((file, entry))
            return None
        return entry

    @property
    def nothing_between(self) -> bool:
        """Whether no line has come that belongs before the last one of what was ahead."""
        last = self._mark.last
        return last is None or all(head is None or head.key > last for head in self._heads)

    def to_the_end(self, final: Mark | None) -> tuple[Marks, Past]:
        """Args: final: the mark from which on everything may be in another order, if it lies before this one."""
        both = self._heads[0] is not None and self._heads[1] is not None
        while (first := self._heads[0]) is not None and (second := self._heads[1]) is not None:
            self._take(0 if first.key <= second.key else 1)
        if final is None or both:
            final = self._marked(None)
            ahead: list[tuple[float, Mark]] = []
        else:
            ahead = [(self._mark.last[0], self._mark)] if self._mark.last is not None else []
        marks = Marks(final, self._go_ahead(ahead))
        for file, entry in self._torn:  # its writer may have written all but the line's end
            self._fold(file, entry)
        return marks, self._past

    def _go_ahead(self, ahead: list[tuple[float, Mark]]) -> Mark | None:
        """Take the rest of the file that has one; the last mark in it that is old enough."""
        count, key = 0, None
        for file in (0, 1):
            while (head := self._heads[file]) is not None:
                if count and key is not None and count % AHEAD_LINES == 0:
                    ahead.append((key[0], self._marked(key)))
                    while len(ahead) > 1 and ahead[1][0] <= key[0] - AHEAD_S:
                        del ahead[0]
                key, count = head.key, count + 1
                self._take(file)
        until = [mark for t, mark in ahead if key is None or t <= key[0] - AHEAD_S]
        return until[-1] if until else None

    def _take(self, file: int) -> None:
        entry = self._heads[file]
        assert entry is not None
        self._fold(file, entry)
        self._at[file] = entry.end, entry.key[0]
        self._heads[file] = self._next(file)

    def _fold(self, file: int, entry: Entry) -> None:
        if entry.found is None:
            return
        if file == 0:
            self._past.event(entry.found, entry.begin, valid=entry.valid)
        else:
            self._past.metrics(entry.found, valid=entry.valid)

    def _marked(self, last: Key | None) -> Mark:
        return Mark(_encoder.encode(self._past), self._position(0), self._position(1), last)

    def _position(self, file: int) -> Position:
        (offset, latest), head = self._at[file], self._heads[file]
        seen = offset if head is None else head.end
        return Position(offset, latest, seen, self._streams[file].proof(seen))
