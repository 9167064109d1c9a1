"""torch's flight recorder: what collectives a rank has begun and not finished, asked for before the rank is killed.

A thread of the worker waits for a signal that nobody else uses, and leaves the record as a file in torch's own format (for
`torchfrtrace`), with a line in words, and the stacks of all threads but the main one, which says itself where it is (see
`resilient.agent.inspection`). It needs the interpreter for a moment: a rank that waits in a collective has given it free,
one that keeps it for itself is left to its stacks. Owns both ends of that.

To name the frames of a record torch looks for `torch._inductor` (2.11, `combined_traceback.cpp`), which is imported by that: two
seconds of processor time, nine beside a main thread that spins, and a thousand files opened by every rank of a world that hangs.
The thread that answers does not find it where nobody else has imported it; torch then names frames without it.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from itertools import islice
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import msgspec

from checkpoint.typed import built
from resilient.agent.frames import current_frames
from resilient.agent.held import held_in
from resilient.agent.inspection import bears
from resilient.recovery.standing import Standing, group_of, number_of, standing, unfinished, what_of

RECORDER_SIGNAL = signal.SIGRTMIN + 8
STANDING = ".standing"  # the file beside a record with where the worker stands
THREADS = ".threads"  # and with the stacks of its other threads, in faulthandler's words; it is there when that is
ANSWER_BYTES = 1 << 20
CALLS = 100  # of a stack, as many as faulthandler writes
_standing = msgspec.json.Decoder(built(Standing | None))
_DUMPS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}


def answer_with_record(path: Path) -> None:
    """In a worker, before it has any other thread: leave the record here, and what it says beside it, whenever it is asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {RECORDER_SIGNAL})  # and in all threads that it will have

    def answer() -> None:
        sys.meta_path.insert(0, _WithoutInductor())
        while True:
            signal.sigwait({RECORDER_SIGNAL})
            _leave(path)

    threading.Thread(target=answer, name="resilient-recorder", daemon=True).start()


_thread = threading.local()  # has `answers` while it asks torch for stacks; not an ident, which a thread of a forked child may have


class _WithoutInductor(MetaPathFinder):
    """Has a thread find no `torch._inductor` while it asks torch for stacks; all others import it as ever."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Leave it to other finders. Raises AttributeError: what else `hasattr` meets is printed since Python 3.13."""
        if fullname == "torch._inductor" and getattr(_thread, "answers", False):
            raise AttributeError(fullname)


def _leave(path: Path) -> None:
    """First where the rank stands, then the record, whose stacks torch must find names for."""
    found: Standing | None = None
    for _, data in _dumps(stacks=False):
        found = found or standing(pickle.loads(data))  # of this very process
    if found is not None:
        found = replace(found, held=held_in(threading.main_thread().ident or 0))
    _put(path.with_suffix(THREADS), _other_threads().encode(errors="replace"))
    _put(path.with_suffix(STANDING), msgspec.json.encode(found))
    said: list[str] = []
    _thread.answers = True
    for backend, data in _dumps(stacks=True):
        path.with_suffix(f".{backend}").write_bytes(data)
        said.append(f"{backend}: {in_words(pickle.loads(data))}")
    _thread.answers = False
    _put(path, ("\n".join(said) or "torch has none here").encode())  # the rest is there when this is


def _other_threads() -> str:
    """The stacks of all threads but this one and the main one. None of them moves meanwhile: this thread has the interpreter."""
    mine = {threading.get_ident(), threading.main_thread().ident}
    return "".join(
        f"Thread 0x{ident:016x} (most recent call first):\n{_stack(frame)}\n"
        for ident, frame in current_frames().items()
        if ident not in mine
    )


def _stack(frame: FrameType) -> str:
    calls = ((each.f_code, line) for each, line in islice(traceback.walk_stack(frame), CALLS))
    return "".join(f'  File "{code.co_filename}", line {line} in {code.co_name}\n' for code, line in calls)


def _put(path: Path, data: bytes) -> None:
    """A file that is whole once it is there."""
    new = path.with_suffix(f"{path.suffix}.new")
    new.write_bytes(data)
    new.replace(path)


def _dumps(*, stacks: bool) -> Iterator[tuple[str, bytes]]:
    """The records of the backends that have remembered anything."""
    torch = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    for backend, name in _DUMPS.items():
        dump = getattr(c10d, name, None)
        if dump is not None and pickle.loads(data := dump(includeStackTraces=stacks)).get("entries"):
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
    if bears(pid, RECORDER_SIGNAL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, RECORDER_SIGNAL)


def wait_for_standings(paths: Collection[Path], until: float) -> None:
    """Wait until all workers that leave their records here have said where they stand, at most until `time.monotonic` says so."""
    _wait([path.with_suffix(STANDING) for path in paths], until)


def wait_for_answers(paths: Collection[Path], until: float) -> None:
    """Wait for the records themselves."""
    _wait(paths, until)


def _wait(paths: Collection[Path], until: float) -> None:
    while time.monotonic() < until and not all(path.exists() for path in paths):
        time.sleep(0.002)


def stands(path: Path, within_s: float = float("inf")) -> bool:
    """Whether a worker has said where it stands, and not longer ago than that: its record follows."""
    try:
        return time.time() - path.with_suffix(STANDING).stat().st_mtime < within_s
    except OSError:
        return False


def answers(path: Path) -> Mapping[str, Path]:
    """By backend, the files that a worker has left; empty while it has not answered, or has no record."""
    found = {backend: path.with_suffix(f".{backend}") for backend in _DUMPS}
    return {backend: file for backend, file in found.items() if path.exists() and file.exists()}


def standing_of(path: Path) -> Standing | None:
    """Where a worker stands that was asked; None if it waits in no collective, or has not answered.

    The worker says so itself: its record is a pickle, which nobody unpickles who has not made it.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with path.with_suffix(STANDING).open("rb") as file:
            found: Standing | None = _standing.decode(file.read(ANSWER_BYTES))
            return found
    return None


def threads_of(path: Path) -> str:
    """The stacks of the other threads of a worker that was asked; empty if it has none, or has not answered."""
    with contextlib.suppress(OSError):
        with path.with_suffix(THREADS).open("rb") as file:
            return file.read(ANSWER_BYTES).decode(errors="replace")
    return ""


def forget(path: Path) -> None:
    """Remove what a worker has left."""
    beside = [name + new for name in (STANDING, THREADS) for new in ("", ".new")]
    for suffix in ("", f"{path.suffix}.new", *beside, *(f".{backend}" for backend in _DUMPS)):
        path.with_suffix(suffix or path.suffix).unlink(missing_ok=True)
