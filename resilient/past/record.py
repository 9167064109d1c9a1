"""The file that has a campaign's past: `.past` in its run directory. Written by the job that writes the ledger, read by anybody.

It is a hash and what it is of, and is replaced as a whole. A reader takes what is true of the ledger and the metrics that it finds,
reads only what comes after, and gets what it would get of them alone: a file that is missing, cut off, old, or of another campaign
costs time and nothing else.
"""

import hashlib
import secrets
from contextlib import suppress
from pathlib import Path

import msgspec

from checkpoint.typed import built
from resilient import ledger
from resilient.past.fold import Past
from resilient.past.order import Marks, beginning, brought_up, decoded_past, fitting
from resilient.past.stream import Stream

FILE = ".past"
FORMAT = b"resilient past 11\n"  # another one for each change of what is kept, or of how it is counted
_HASH_BYTES = hashlib.sha256().digest_size

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(built(Marks))


def encoded(marks: Marks) -> bytes:
    """As the file has it."""
    data = _encoder.encode(marks)
    return FORMAT + hashlib.sha256(data).digest() + data


def decoded(data: bytes) -> Marks:
    """What a file has; the beginning where it is none."""
    begin = len(FORMAT) + _HASH_BYTES
    if not data.startswith(FORMAT) or hashlib.sha256(data[begin:]).digest() != data[len(FORMAT) : begin]:
        return beginning()
    try:
        marks = _decoder.decode(data[begin:])
        for mark in (marks.final, marks.ahead):
            if mark is not None:
                decoded_past(mark)
    except ValueError:  # it is of another version
        return beginning()
    return marks


class Reader:
    """Reads the past of a run directory again and again, each time what has come since.

    Attributes:
        marks: up to where it was read.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        try:
            self.marks = decoded((run_dir / FILE).read_bytes())
        except OSError:
            self.marks = beginning()

    def read(self) -> Past:
        """The past until now. Raises OSError."""
        with Stream(self._run_dir / ledger.EVENTS) as events, Stream(self._run_dir / ledger.METRICS) as metrics:
            self.marks, past = brought_up(fitting(self.marks, events, metrics), events, metrics)
        return past

    def keep(self) -> None:
        """Write what was read. Raises OSError."""
        path = self._run_dir / FILE
        fresh = path.with_name(f"{FILE}.{secrets.token_hex(4)}")
        try:
            fresh.write_bytes(encoded(self.marks))
            fresh.replace(path)
        except BaseException:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise


def read(run_dir: Path) -> Past:
    """The past of a run directory until now. Raises OSError."""
    return Reader(run_dir).read()
