"""torch's flight recorder: what collectives a rank has begun and not finished, asked for before the rank is killed.

A thread of the worker waits for a signal that nobody else uses, and leaves the record as a file in torch's own format (for
`torchfrtrace`), with a line in words. It needs the interpreter for a moment: a rank that waits in a collective has given it free,
one that keeps it for itself is left to its stacks. Owns both ends of that.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from resilient.standing import Standing, group_of, number_of, standing, unfinished, what_of

RECORDER_SIGNAL = signal.SIGRTMIN + 8
STANDING = ".standing"  # the file beside a record with where the worker stands
STANDING_BYTES = 1 << 20
_standing = msgspec.json.Decoder(Standing | None)
_DUMPS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}


def answer_with_record(path: Path) -> None:
    """In a worker, before it has any other thread: leave the record here, and what it says beside it, whenever it is asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {RECORDER_SIGNAL})  # and in all threads that it will have

    def answer() -> None:
        while True:
            signal.sigwait({RECORDER_SIGNAL})
            _leave(path)

    threading.Thread(target=answer, name="resilient-recorder", daemon=True).start()


def _leave(path: Path) -> None:
    said: list[str] = []
    found: Standing | None = None
    for backend, data in _dumps():
        path.with_suffix(f".{backend}").write_bytes(data)
        record = pickle.loads(data)  # of this very process
        said.append(f"{backend}: {in_words(record)}")
        found = found or standing(record)
    path.with_suffix(STANDING).write_bytes(msgspec.json.encode(found))
    new = path.with_suffix(".new")
    new.write_text("\n".join(said) or "torch has none here")
    new.replace(path)  # the rest is there when this is


def _dumps() -> Iterator[tuple[str, bytes]]:
    """The records of the backends that have remembered anything."""
    torch = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    for backend, name in _DUMPS.items():
        dump = getattr(c10d, name, None)
        if dump is not None and pickle.loads(data := dump()).get("entries"):
            yield backend, data


def in_words(record: Mapping[str, Any]) -> str:
    """How many collectives a record holds, and the first that is not finished, else the last."""
    entries, pending = record["entries"], unfinished(record)
    entry = pending[0] if pending else entries[-1]
    what = f"number {number_of(entry)} of group {group_of(entry)}, {what_of(entry)}"
    found = f"{len(pending)} not finished, the first: {what}" if pending else f"all are finished, the last: {what}"
    return f"{len(entries)} collectives remembered; {found}"


def ask(pid: int, path: Path) -> None:
    """Ask a worker for its record; what it left before is forgotten."""
    forget(path)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, RECORDER_SIGNAL)


def wait_for_answers(paths: Collection[Path], until: float) -> None:
    """Wait until all workers that leave their records here have answered, at most until then, as `time.monotonic` counts."""
    while time.monotonic() < until and not all(path.exists() for path in paths):
        time.sleep(0.002)


def answers(path: Path) -> Mapping[str, Path]:
    """By backend, the files that a worker has left; empty while it has not answered, or has no record."""
    found = {backend: path.with_suffix(f".{backend}") for backend in _DUMPS}
    return {backend: file for backend, file in found.items() if path.exists() and file.exists()}


def standing_of(path: Path) -> Standing | None:
    """Where a worker stands that was asked; None if it waits in no collective, or has not answered.

    The worker says so itself: its record is a pickle, which nobody unpickles who has not made it.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.exists():
            with path.with_suffix(STANDING).open("rb") as file:
                found: Standing | None = _standing.decode(file.read(STANDING_BYTES))
                return found
    return None


def forget(path: Path) -> None:
    """Remove what a worker has left."""
    for suffix in ("", ".new", STANDING, *(f".{backend}" for backend in _DUMPS)):
        path.with_suffix(suffix or path.suffix).unlink(missing_ok=True)
