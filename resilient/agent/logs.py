"""The output of a node's ranks: read from their pipes at once, and written to the node's log as soon as that can be done.

The agent's own log takes the same way, and what its other processes print. Owns the pipes, the node's log files and two threads.
One reads the pipes and never touches the run directory; the other writes, and may hang in it for as long as the file system does.
Between them is a buffer with a bound: when it is full, the oldest lines go, and the log says how many. So a run directory that
stalls, is full or gone never stops a process that prints.

Each line of a rank is written as `2026-01-31 12:00:00.123 [rank 3] text`, in local time, when it was read.
"""

import errno
import fcntl
import logging
import os
import re
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from resilient.driver.lease import must_be_there

log = logging.getLogger(__name__)

BUFFER_BYTES = 4 << 20  # of lines that wait to be written
BATCH_BYTES = 256 << 10  # that are written at once
LINE_BYTES = 16 << 10  # a longer line becomes several
TAIL_BYTES = 8 << 10  # of a rank's output, kept in memory as evidence
PIPE_BYTES = 256 << 10
READ_BYTES = 64 << 10
PARTIAL_S = 1.0  # a line without an end is written when nothing has come for so long
ORPHAN_S = 1.0  # what a rank has started may hold its pipe open; so long it is read after the rank's end
RETRY_S = 1.0  # between attempts to write
CLOSE_S = 1.0  # for the last lines, when the agent ends

_LINE_END = re.compile(rb"\r\n|\n|\r")


class PipeOutput:
    """What processes print to a pipe.

    Invariant: only the reading thread changes it, but for `end`.

    Args:
        fd: the end that is read; it is closed here.
        log_file: where the lines are to be written.
    """

    def __init__(self, fd: int, log_file: Path) -> None:
        self._fd, self.log_file = fd, log_file
        self._rest = b""
        self._tail = bytearray()
        self._read_t = 0.0
        self._ended_t: float | None = None
        self._drained, self._over = threading.Event(), threading.Event()
        os.set_blocking(fd, False)
        with suppress(OSError):  # more than this user may have
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def fileno(self) -> int:
        return self._fd

    def end(self) -> None:
        """Who printed has ended: read what is left, but wait for nobody else who may hold the pipe."""
        if self._ended_t is None:
            self._ended_t = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether its pipe was read to its end, or given up."""
        return self._over.is_set()

    @property
    def drained(self) -> bool:
        """Whether all that it had printed when it ended was read."""
        return self._drained.is_set()

    @property
    def to_drain(self) -> bool:
        """Whether it has ended since `drain` was called last."""
        return self._ended_t is not None and not self.drained

    def tail(self) -> str:
        """The end of what was printed so far."""
        return bytes(self._tail).decode(errors="replace")

    # -- in the reading thread -----------------------------------------------------------------------------------------

    def read(self) -> tuple[list[bytes], bool]:
        """The lines that have come, and whether this was the end."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return [], False
        if not data:
            return self.rest(), True
        self._read_t = time.monotonic()
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        text = self._rest + data
        held = b"\r" if text.endswith(b"\r") else b""  # a line feed may follow
        *lines, rest = _LINE_END.split(text.removesuffix(held))
        self._rest = rest + held
        found = [piece for line in lines for piece in _pieces(line)]
        while len(self._rest) > LINE_BYTES:
            found.append(self._rest[:LINE_BYTES])
            self._rest = self._rest[LINE_BYTES:]
        return self._dressed(found), False

    def rest(self) -> list[bytes]:
        """A line that has no end yet."""
        rest, self._rest = self._rest, b""
        return self._dressed(_pieces(rest.removesuffix(b"\r"))) if rest else []

    def left(self) -> list[bytes]:
        """What lies in the pipe, however much that is, and a line that has no end yet; nothing is waited for."""
        return self.drain()[0] + self.rest()

    def drain(self) -> tuple[list[bytes], bool]:
        """The lines that lie in the pipe, and whether this was the end; nothing is waited for."""
        found, over = list[bytes](), False
        for _ in range(PIPE_BYTES // READ_BYTES + 1):  # and no more of what somebody else goes on printing
            lines, over = self.read()
            found += lines
            if over:
                break
        if self._ended_t is not None:
            self._drained.set()
        return found, over

    def due_s(self, now: float) -> float | None:
        """When to come back although nothing was printed, in seconds; None: no need to."""
        times = [self._read_t + PARTIAL_S - now] if self._rest else []
        times += [self._ended_t + ORPHAN_S - now] if self._ended_t is not None else []
        return min(times, default=None)

    def is_given_up(self, now: float) -> bool:
        """Whether who printed ended long ago, and somebody else holds the pipe."""
        return self._ended_t is not None and now >= self._ended_t + ORPHAN_S

    def is_quiet(self, now: float) -> bool:
        """Whether the last line waits for its end in vain."""
        return bool(self._rest) and now >= self._read_t + PARTIAL_S

    def close(self) -> None:
        self._over.set()
        os.close(self._fd)

    def _dressed(self, lines: Iterable[bytes]) -> list[bytes]:
        """Lines as they are to be written."""
        return [line + b"\n" for line in lines]


class RankOutput(PipeOutput):
    """What one rank prints in one generation.

    Its pipe has a name, under which the rank opens it: a rank may be a process that was forked long before.

    Args:
        rank: number, for the lines.
        pipe: path of the pipe, which is made here.
        log_file: where the lines are to be written.

    Raises:
        OSError: the pipe cannot be made.
    """

    def __init__(self, rank: int, pipe: Path, log_file: Path) -> None:
        self.pipe = pipe
        self._label = f" [rank {rank}] ".encode()
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe, 0o600)
        super().__init__(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), log_file)

    def close(self) -> None:
        super().close()
        self.pipe.unlink(missing_ok=True)

    def _dressed(self, lines: Iterable[bytes]) -> list[bytes]:
        head = stamp(time.time()).encode() + self._label
        return [head + line + b"\n" for line in lines]


def _pieces(line: bytes) -> list[bytes]:
    """A line, or the parts of one that is too long."""
    return [line[start : start + LINE_BYTES] for start in range(0, len(line), LINE_BYTES)] or [b""]


def stamp(t: float) -> str:
    """A time as the logs have it. Args: t: unix seconds."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) + f".{int(t % 1 * 1000):03}"


class LogWriter:
    """Appends lines to files, in a thread of its own.

    Invariants: `put` never waits for a file. At most `limit_bytes` of lines wait, and one batch is being written; of what was
    put, each line is written whole, or counted in a line that says how many were dropped. Lines of one file stay in order.

    Args:
        run_dir: where the files are: lines wait while it is gone, and nothing is made in its place. None: files may be anywhere.
        limit_bytes: of lines that wait.
    """

    def __init__(self, run_dir: Path | None = None, limit_bytes: int = BUFFER_BYTES) -> None:
        self._run_dir = run_dir
        self._limit_bytes = limit_bytes
        self._lines: deque[tuple[Path, bytes]] = deque()
        self._held_bytes = 0
        self._dropped = 0  # since a line was taken to be written
        self._put, self._settled = 0, 0  # lines so far; settled: written or dropped
        self._changed = threading.Condition()
        self._closing, self._stopped = False, threading.Event()
        self._file: tuple[Path, int] | None = None
        self._thread = threading.Thread(target=self._work, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, path: Path, lines: Iterable[bytes]) -> None:
        """Have lines written to the end of a file, which is made if need be with its directory; for that an empty one is enough."""
        with self._changed:
            for line in lines:
                self._lines.append((path, line))
                self._held_bytes += len(line)
                self._put += 1
            while self._held_bytes > self._limit_bytes:
                line = self._lines.popleft()[1]
                self._held_bytes -= len(line)
                self._dropped += bool(line)
                self._settled += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put before is written, at most that long; whether it is."""
        with self._changed:
            wanted = self._put
            return self._changed.wait_for(lambda: self._settled >= wanted, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is left, as far as that can be done in this time."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._stopped.set()

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            path, lines, dropped = batch
            note = [f"{stamp(time.time())} ... {dropped} lines dropped while the log could not be written\n".encode()]
            self._write(path, b"".join([*(note if dropped else []), *lines]))
            if self._stopped.is_set():
                break
            with self._changed:
                self._settled += len(lines)
                self._changed.notify_all()
        self._drop_file()

    def _take(self) -> tuple[Path, list[bytes], int] | None:
        """The lines to be written next, of one file, and how many were dropped before them; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closing)
            if not self._lines:
                return None
            path, lines, size = self._lines[0][0], [], 0
            while self._lines and self._lines[0][0] == path and size < BATCH_BYTES:
                lines.append(self._lines.popleft()[1])
                size += len(lines[-1])
            self._held_bytes -= size
            dropped, self._dropped = self._dropped, 0
            return path, lines, dropped

    def _write(self, path: Path, data: bytes) -> None:
        """Write all of it, however long it takes; a line that was cut short is continued."""
        left, said = memoryview(data), False
        while True:
            try:
                left = left[os.write(self._opened(path), left) :]
                if not left:
                    return
                continue
            except OSError as error:
                self._drop_file()
                if not said and error.errno != errno.ENOENT:
                    log.warning("%s cannot be written: %s; trying again", path, error.strerror)
                said = True
            if self._stopped.wait(RETRY_S):
                return

    def _opened(self, path: Path) -> int:
        if self._file is None or self._file[0] != path:
            self._drop_file()
            if self._run_dir is not None:
                must_be_there(self._run_dir)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path, os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._file[1]

    def _drop_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file[1])
            self._file = None


class NodeOutput:
    """The output of all ranks of a node, and of its agent's processes. See the module.

    Invariant: what a process prints is read whatever the agent's own thread and the run directory do.

    Args:
        run_dir: as of `LogWriter`.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self._writer = LogWriter(run_dir)
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._new: deque[PipeOutput] = deque()
        self._ending, self._over, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="log-reader", daemon=True)
        self._thread.start()

    def open(self, rank: int, pipe: Path, log_file: Path) -> RankOutput:
        """The output of a rank that is about to start; arguments and errors as for `RankOutput`.

        The log is made even if nothing is printed: what a rank may leave beside it needs the directory.
        """
        output = RankOutput(rank, pipe, log_file)
        self._writer.put(log_file, [b""])
        self._new.append(output)
        self._wake()
        return output

    def pass_on(self, fd: int, log_file: Path) -> None:
        """Read what processes print to a pipe to its end, and write it as it is.

        Args:
            fd: the end that is read; it is this one's from now on.
        """
        self._new.append(PipeOutput(fd, log_file))
        self._wake()

    def end(self, output: RankOutput) -> None:
        """The rank has ended."""
        output.end()
        self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was read before is written, at most that long; whether it is."""
        return self._writer.flush(timeout_s)

    @contextmanager
    def logging_to(self, path: Path) -> Iterator[None]:
        """Have this process's log written to a file by the thread that may hang in it, and no other."""
        root = logging.getLogger()
        before = root.handlers[:]
        handler = _Handler(self._writer, path)
        if before:
            handler.setFormatter(before[0].formatter)
        root.handlers = [handler]
        try:
            yield
        finally:
            root.handlers = before

    def end_all(self) -> None:
        """All ranks have ended: read what is left and give their pipes back, within `ORPHAN_S`; returns at once."""
        self._ending.set()
        self._wake()

    @property
    def over(self) -> bool:
        """Whether the pipes of ranks were given back."""
        return self._over.is_set()

    def close(self) -> None:
        """Read what is left, and write it as far as that can be done within `CLOSE_S`."""
        self._closing.set()
        self.end_all()
        self._thread.join(ORPHAN_S + CLOSE_S)
        self._writer.close(CLOSE_S)
        for each in (self._woken, self._waker):
            os.close(each)

    def __enter__(self) -> "NodeOutput":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # there is enough to wake it already
            os.write(self._waker, b"\0")

    def _work(self) -> None:
        reading: set[PipeOutput] = set()
        while True:
            while self._new:
                reading.add(output := self._new.popleft())
                self._selector.register(output, selectors.EVENT_READ)
            ranks = [output for output in reading if isinstance(output, RankOutput)]
            if self._ending.is_set():
                for output in ranks:
                    output.end()
                if not ranks:
                    self._over.set()
                    if self._closing.is_set():
                        break
            now = time.monotonic()
            waits = [due for output in reading if (due := output.due_s(now)) is not None]
            ready = {key.fileobj for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None)}
            if self._woken in ready:
                with suppress(BlockingIOError):
                    os.read(self._woken, 1 << 10)
            now = time.monotonic()
            for output in list(reading):
                if output.to_drain:
                    lines, over = output.drain()
                else:
                    lines, over = output.read() if output in ready else ([], False)
                given_up = not over and output.is_given_up(now)
                if given_up:  # this thread may have got no core since the rank has ended
                    lines += output.left()
                elif output.is_quiet(now):
                    lines += output.rest()
                if lines:
                    self._writer.put(output.log_file, lines)
                if over or given_up:
                    reading.discard(output)
                    self._selector.unregister(output)
                    output.close()
        for output in reading:  # nobody waits for the ends of others
            self._writer.put(output.log_file, output.left())
            output.close()
        self._selector.close()


class _Handler(logging.Handler):
    """Hands records to a `LogWriter`."""

    def __init__(self, writer: LogWriter, path: Path) -> None:
        super().__init__()
        self._writer, self._path = writer, path

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(self._path, [self.format(record).encode(errors="replace") + b"\n"])
