"""What is printed, without waiting for where it goes: a terminal that is gone or held, a pipe without a reader, a full disk.

Owns a thread that writes for a text stream. What is not taken fills no memory: beyond a bound the oldest text is left out. What is
wrong with a stream is said once, elsewhere.
"""

import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TextIO, cast

KEPT_CHARACTERS = 1 << 20
SLOW_S = 5.0  # with nothing taken
PRINT_S = 5.0  # for what is still to be printed at the end

# The terminal, the reader or the descriptor does not come back; from any other error, as of a full disk, a stream may.
_FOR_GOOD = {errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO, errno.ECONNRESET, errno.ENOTCONN}


class PatientStream(io.TextIOBase):
    """A text stream that never blocks, and never fails.

    Invariant: `_waiting` holds at most KEPT_CHARACTERS, or one text; nothing is written any more once `gone`.

    Args:
        stream: where the text goes in the end; None: nowhere, it was closed before this process began.
        trouble: told in a few words what is wrong with the stream, or that it is well again; from any thread.
        slow_s: after so long without anything taken the stream is told to be slow.
    """

    def __init__(self, stream: TextIO | None, trouble: Callable[[str], None] = lambda _: None, slow_s: float = SLOW_S) -> None:
        self._stream = stream
        self._fd = _descriptor(stream)
        self._trouble = trouble
        self._slow_s = slow_s
        self.gone = stream is None
        self._wrong = ""  # what was said of it
        self._waiting: deque[str] = deque()
        self._size = 0
        self._busy = False
        self._since_t = 0.0  # monotonic: when something was taken, or there was nothing to be taken
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)
        if self.gone:
            trouble("it is closed")
        else:
            self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return (self._stream.encoding if self._stream is not None else None) or "utf-8"

    def isatty(self) -> bool:
        return not self.gone and self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, str):  # by which click finds out whether this is a stream of bytes
            raise TypeError(f"a text stream takes text, not {type(text).__name__}")
        if self.gone or not text:
            return len(text)
        with self._changed:
            if not self._waiting and not self._busy:
                self._since_t = time.monotonic()
            self._waiting.append(text)
            self._size += len(text)
            while self._size > KEPT_CHARACTERS and len(self._waiting) > 1:
                self._size -= len(self._waiting.popleft())
            self._changed.notify_all()
        self.keeps_up()
        return len(text)

    def flush(self) -> None:
        """Nothing is waited for; see `drain`."""

    def keeps_up(self) -> bool:
        """Whether all that was written a moment ago is taken; says so, once, where nothing is taken for long."""
        with self._changed:
            waits = bool(self._waiting) or self._busy
            waits_s = time.monotonic() - self._since_t if waits else 0.0
        if waits_s > self._slow_s:
            self._report("it takes nothing; what does not fit is left out")
        return not waits

    def _report(self, wrong: str) -> None:
        if wrong != self._wrong:
            self._wrong = wrong
            self._trouble(wrong or "it takes text again")

    def _run(self) -> None:
        # In the background of a terminal that wants to stop those who write (`stty tostop`): it may not.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._waiting and not self._ended:
                    self._changed.wait()
                if not self._waiting:
                    return
                text = "".join(self._waiting)
                self._waiting.clear()
                self._size = 0
                self._busy = True
            try:
                self._write(text)
            except OSError as error:
                self.gone = error.errno in _FOR_GOOD
                self._report(error.strerror or str(error))
            except ValueError:
                self.gone = True
                self._report("it is closed")
            else:
                self._report("")
            if self.gone:
                with self._changed:
                    self._waiting.clear()

    def _write(self, text: str) -> None:
        """Raises OSError, ValueError. By the descriptor: what the stream itself keeps after an error fails again at the exit."""
        if self._fd is None:
            assert self._stream is not None
            self._stream.write(text)
            self._stream.flush()
            return
        data = memoryview(text.encode(self.encoding, "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
                self._since_t = time.monotonic()
            except BlockingIOError:  # somebody else who has it open wants it so
                writable = select.poll()
                writable.register(self._fd, select.POLLOUT)
                writable.poll()

    def drain(self, patience_s: float) -> bool:
        """Wait until all is printed; whether it is, or never will be."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, patience_s)

    def end(self, patience_s: float) -> bool:
        """Print what is left and end the thread; whether that was done in time."""
        done = self.drain(patience_s)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        return done


def _descriptor(stream: TextIO | None) -> int | None:
    """Of a stream that has one; what it holds is written first, as far as that can be done."""
    if stream is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None


class Notes(Protocol):
    """Takes what is to be known of the streams."""

    def note(self, text: str) -> None: ...


@contextlib.contextmanager
def patient(notes: Notes) -> Iterator[None]:
    """Standard output and standard error are patient meanwhile: whatever becomes of them holds up nobody, and ends nothing."""

    def trouble_of(name: str) -> Callable[[str], None]:
        return lambda text: notes.note(f"{name}: {text}")

    before = sys.stdout, sys.stderr
    opened = (sys.stdout if sys.__stdout__ is not None else None, sys.stderr if sys.__stderr__ is not None else None)
    names = ("standard output", "standard error")
    streams = [PatientStream(stream, trouble_of(name)) for stream, name in zip(opened, names, strict=True)]
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        deadline = time.monotonic() + PRINT_S
        for stream in streams:
            stream.end(max(0.0, deadline - time.monotonic()))


def print_at_once(text: str, patience_s: float = 1.0) -> None:
    """Print to standard error in a process that ends at once: what is patient would take it along."""
    stream = sys.stderr
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()
        if isinstance(stream, PatientStream):
            stream.drain(patience_s)


def drain(patience_s: float = 1.0) -> None:
    """Wait a moment until what was printed is taken, or it is known what is wrong with where it goes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, PatientStream):
            stream.drain(patience_s)


def keep_descriptors() -> None:
    """Where a standard stream was closed before this process began, it is /dev/null, and its descriptor nobody else's.

    `sys.__stdout__` and `sys.__stderr__` stay None, by which `patient` knows.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # now that no other takes the descriptors of these
        if getattr(sys, name) is None:  # libraries print to it, and ask whether it is a terminal
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for as long as the process is there
