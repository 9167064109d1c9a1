"""The files of a run directory, read once from the beginning to the end into what the report tells.

Lines are decoded by the megabyte into types that have what the report needs of them. Where one of them is torn or is no such line,
its neighbours are taken one by one, with the same idea of a whole line as every other reader's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from checkpoint.typed import built
from resilient import entries, ledger
from resilient.entries import Count, Seconds, Time
from resilient.report.past import Fold, Past, Snapshot

READ_BYTES = 4 << 20
_SNAPSHOT = b'"event": "snapshot"'  # as the writer spells it; lines that spell it otherwise only take longer

T = TypeVar("T", bound=msgspec.Struct)


class _Step(msgspec.Struct, gc=False):
    t: Time
    generation: Count
    step: Count | UnsetType = UNSET
    loss: float | None = None
    tokens_per_s: float | None = None
    step_s: Seconds | None = None
    data_s: Seconds | None = None


_SNAPSHOTS, _STEPS = msgspec.json.Decoder(built(Snapshot)), msgspec.json.Decoder(built(_Step))


def read(run_dir: Path) -> Past:
    """What the ledger and the metrics of a run directory tell. Raises OSError."""
    fold = Fold()
    for data in _blocks(run_dir / ledger.EVENTS):
        snapshots: list[bytes] = []
        for line in data.splitlines():
            if _SNAPSHOT in line:
                snapshots.append(line)
            elif (found := ledger.parsed(line)) is not None and entries.is_event(found):
                if found["event"] == "run_started":  # those before it belong to the job before
                    fold.snapshots(_all(b"\n".join(snapshots), _SNAPSHOTS))
                    snapshots.clear()
                fold.event(found)
        fold.snapshots(_all(b"\n".join(snapshots), _SNAPSHOTS))
    for data in _blocks(run_dir / ledger.METRICS):
        steps = [each for each in _all(data, _STEPS) if each.step is not UNSET]
        if steps:
            fold.steps(
                [each.t for each in steps],
                [each.step for each in steps if each.step is not UNSET],
                [each.generation for each in steps],
                [each.loss for each in steps],
                [each.tokens_per_s for each in steps],
                [each.step_s for each in steps],
            )
    return fold.past


def _blocks(path: Path) -> Iterator[bytes]:
    """A file, after its parts that were moved aside, in blocks of whole lines; the last line of each may lack its end.

    Lines that are too long are left out.
    """
    for part in ledger.parts(path):
        try:
            file = part.open("rb")
        except FileNotFoundError:
            continue
        with file:
            yield from _blocks_of(file)


def _blocks_of(file: BinaryIO) -> Iterator[bytes]:
    rest = b""
    skipping = False
    while data := file.read(READ_BYTES):
        if skipping:  # the rest of a line that is too long
            end = data.find(b"\n")
            skipping = end < 0
            data = b"" if skipping else data[end + 1 :]
        cut = data.rfind(b"\n") + 1
        if cut:
            yield rest + data[:cut]
            rest = data[cut:]
        else:
            rest += data
        if len(rest) > ledger.LINE_BYTES:
            rest, skipping = b"", True
    if rest:
        yield rest


def _all(data: bytes, decoder: msgspec.json.Decoder[T]) -> list[T]:
    try:
        return decoder.decode_lines(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [found for line in data.splitlines() if (found := _one(line, decoder)) is not None]


def _one(line: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
    """A line, if it is one of these; also in the JSON of Python, which knows NaN."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = ledger.parsed(line)
    try:
        return None if found is None else msgspec.convert(found, built(decoder.type))
    except (msgspec.ValidationError, RecursionError):
        return None
