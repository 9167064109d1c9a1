"""Records that found no driver: what an agent still held when the connection ended, left in the run directory for the next driver.

The driver is the only writer of the ledger and acknowledges what it has written. An agent that ends, for whatever reason, leaves
what was not acknowledged in a file of its own; a driver takes those files in when it starts and when it ends. A record that was
written, but whose acknowledgement was lost, is recognized and not written twice.
"""

import errno
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from checkpoint.errors import AWAY, naming
from checkpoint.typed import built
from resilient import ledger
from resilient.driver.lease import must_be_there
from resilient.protocol.messages import Record

log = logging.getLogger(__name__)

_DIRECTORY = ".spill"
_PASSING = AWAY | {errno.EIO}  # of reading: another try may succeed
CLOCKS_S = 600.0  # by which clocks of nodes may differ
SCRIPT_CHECKPOINT = "script_checkpoint"  # each rank that writes a part of it tells; the ledger has what rank 0 tells


def leave(run_dir: Path, generation: int, host: str, records: Iterable[Record]) -> None:
    """Leave records of one generation behind, durably; nothing is written where there are none.

    It waits for the file system, for as long as that takes.

    Raises:
        OSError: they cannot be written, or the run directory is gone.
    """
    items = ([generation, host, each.rank, each.t, each.event, dict(each.fields)] for each in records)
    lines = [json.dumps(item, default=str) + "\n" for item in items]
    if not lines:
        return
    must_be_there(run_dir)  # or they would be hidden below its mount point once it is there again
    directory = run_dir / _DIRECTORY
    directory.mkdir(exist_ok=True)
    name = f"{host}-{os.getpid()}-g{generation}"
    before = len(list(directory.glob(f"{name}-*")))  # an agent leaves those of each rank that it finds
    path = directory / f"{name}-{before}.new"
    with path.open("w") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    path.rename(directory / f"{name}-{before}.jsonl")


class Book(Protocol):
    """Where records are written to; each method raises OSError where it cannot be, and may be called again."""

    def event(self, event: str, fields: Mapping[str, Any], *, generation: int, t: float, host: str) -> object: ...

    def metrics(self, fields: Mapping[str, Any], *, generation: int, t: float) -> object: ...


def take_in(run_dir: Path, book: Book) -> int:
    """Write what agents have left into the ledger, and remove it; returns how many records were new.

    A file that cannot be read is left where it is, and one that cannot be removed, too: its records are known the next time.

    Raises:
        OSError: of the ledger; or of a file, or of their directory, that may be read at another try, once all others are taken in.
            What was not written stays where it is, and the same call may be made again.
    """
    read: dict[Path, list[_Left]] = {}
    failed: OSError | None = None
    for path in _files(run_dir / _DIRECTORY):
        try:
            with naming(path):
                read[path] = _items(path)
        except OSError as error:
            if error.errno in _PASSING:
                failed = failed or error
            else:
                _log_failure(path, "read", error)
    new = _write(run_dir, book, read) if read else 0
    if failed is not None:
        raise failed
    return new


def _files(directory: Path) -> list[Path]:
    """Raises OSError where that may pass; `Path.glob` of Python 3.13 takes such a directory for an empty one."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno in _PASSING:
            raise
        _log_failure(directory, "read", error)
        return []


def _write(run_dir: Path, book: Book, read: Mapping[Path, list["_Left"]]) -> int:
    """Write what is in files, and remove them; returns how many records were new."""
    found = sorted((item for items in read.values() for item in items), key=lambda item: item.t)
    since_t = min((item.t for item in found), default=0.0) - CLOCKS_S
    known = {
        (line.get("generation"), line.get("t"))
        for name in (ledger.EVENTS, ledger.METRICS)
        for line in ledger.since(run_dir / name, since_t)
    }
    new = [item for item in found if (item.generation, item.t) not in known and _is_told(item)]
    for each in new:
        if each.event is None:
            book.metrics(each.fields, generation=each.generation, t=each.t)
        else:
            teller = {"rank": each.rank} if each.event == SCRIPT_CHECKPOINT else {}
            book.event(each.event, {**teller, **each.fields}, generation=each.generation, t=each.t, host=each.host)
    for path in read:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log_failure(path, "removed", error)
    return len(new)


def _log_failure(path: Path, what: str, error: OSError) -> None:
    log.warning("%s, which an agent has left, cannot be %s: %s", path, what, error.strerror)


class _Left(msgspec.Struct, array_like=True):
    generation: Annotated[int, Meta(ge=0, le=1 << 53)]
    host: str
    rank: int
    t: Annotated[float, Meta(ge=0, le=1e11)]
    event: str | None
    fields: dict[str, Any]


def _is_told(each: _Left) -> bool:
    return each.event != "resumed" and (each.event != SCRIPT_CHECKPOINT or each.rank == 0)


def _items(path: Path) -> list[_Left]:
    """The records in a file; what is none, since a disk has lost it, is left out."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            # Python's JSON, which has NaN.
            found.append(msgspec.convert(json.loads(line.decode(errors="replace")), built(_Left)))
        except (ValueError, RecursionError) as error:
            log.warning("a line of %s is left out: %s", path, error)
    return found
