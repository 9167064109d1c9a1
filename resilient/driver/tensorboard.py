"""TensorBoard: every number of the metrics as a scalar over the step, written beside the ledger, so that no restart leaves a gap.

Owns one file of events, and the thread that writes it: tensorboard takes a while to import, and its directory may be a link to
another file system, which is full, gone or hangs. Nobody waits for either, and trouble with them is none of the run directory's
or its process's. A record is whole or not there: after a failure the file is cut back to its last whole record.
"""

import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resilient.driver.lease import must_be_there

log = logging.getLogger(__name__)

FLUSH_S = 5.0  # between two times that the file is written, and between tries of what failed
KEPT = 100_000  # scalars' lines that wait for a file that cannot be written; older ones are left out
BATCH = 1000  # lines that are encoded and written at a time, which takes some 50 ms
_DIRECTORY = "tensorboard"
_MOST = 1e300  # whole numbers have no limit
_UNITS = {"step", "generation", "t"}

Line = tuple[int, float, dict[str, float]]  # step, time, scalars
Encode = Callable[[int, float, Mapping[str, float]], bytes]


class ScalarFile:
    """Invariants: `_pending` is changed under `_changed` only; the first `_end_bytes` of the file are whole records.

    Args:
        queue_size: lines that are kept before they are written, for 5 s at most.
        interval: of the metrics, only every so many steps.
    """

    def __init__(self, run_dir: Path, queue_size: int = 10, interval: int = 1) -> None:
        self._run_dir = run_dir
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._path = run_dir / _DIRECTORY / name
        self._queue_size, self._interval = queue_size, interval
        self._changed = threading.Condition()
        self._pending: deque[Line] = deque(maxlen=KEPT)
        self._ending = threading.Event()
        self._end_bytes = 0
        self._failed: str | None = None
        self._thread: threading.Thread | None = None  # once there is something to write

    def metrics(self, line: Mapping[str, Any]) -> None:
        """A line of metrics."""
        step = line.get("step")
        if isinstance(step, int) and step % self._interval == 0:
            self._put("train", line)

    def event(self, line: Mapping[str, Any]) -> None:
        """A line of the ledger; of these, validations have scalars."""
        if line["event"] == "validation":
            self._put("validation", line)

    def _put(self, group: str, line: Mapping[str, Any]) -> None:
        step, t = line.get("step"), line.get("t")
        if not isinstance(step, int) or not isinstance(t, float):
            return
        scalars = {
            f"{group}/{name}": float(value)
            for name, value in line.items()
            if name not in _UNITS and isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > _MOST
        }
        with self._changed:
            self._pending.append((step, t, scalars))
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)
            self._thread.start()

    def finish(self, patience_s: float) -> None:
        """Write what there is, unless that takes too long; may be called again, to wait longer."""
        with self._changed:
            self._ending.set()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(patience_s)

    # -- in its own thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            header, encode = _encoding()
        except Exception as error:  # noqa: BLE001 - whatever a broken installation raises, as where protobuf's version does not fit
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            log.warning("TensorBoard gets no points, for tensorboard cannot be imported: %s", why)
            self._give_up()
            return
        try:
            self._write_on(header, encode)
        except Exception:
            log.exception("a defect: TensorBoard gets no points any more")
            self._give_up()

    def _give_up(self) -> None:
        with self._changed:
            self._pending = deque(maxlen=0)

    def _write_on(self, header: bytes, encode: Encode) -> None:
        batch: list[Line] = []  # the oldest lines, until they are written
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._ending.is_set() or len(self._pending) >= self._queue_size, FLUSH_S)
                is_last = self._ending.is_set()
            try:
                while batch := batch or self._take():
                    self._write(header, encode, batch)
                    batch = []
            except OSError as error:
                self._log_failure(error)
                self._ending.wait(FLUSH_S)

    def _take(self) -> list[Line]:
        with self._changed:
            return [self._pending.popleft() for _ in range(min(BATCH, len(self._pending)))]

    def _write(self, header: bytes, encode: Encode, batch: list[Line]) -> None:
        """Lines are encoded once the file is open: while it cannot be, tries cost nothing.

        Raises:
            OSError: nothing of it counts as written.
        """
        must_be_there(self._run_dir)
        self._path.parent.mkdir(exist_ok=True)
        fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size < self._end_bytes:
                self._end_bytes = 0  # it is another file
            if os.fstat(fd).st_size > self._end_bytes:
                os.ftruncate(fd, self._end_bytes)
            data = memoryview(b"".join(([] if self._end_bytes else [header]) + [encode(*line) for line in batch]))
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], self._end_bytes + done)
        finally:
            os.close(fd)
        self._end_bytes += done
        if self._failed is not None:
            self._failed = None
            log.warning("points for TensorBoard are written again: %s", self._path.parent)

    def _log_failure(self, error: OSError) -> None:
        detail = error.strerror or str(error)
        if detail != self._failed:
            self._failed = detail
            log.warning("no points for TensorBoard can be written to %s, which is tried again: %s", self._path.parent, detail)


def _encoding() -> tuple[bytes, Encode]:
    """What a file begins with, and how a line becomes a record of it. Imports tensorboard."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import masked_crc32c

    def record(event: Any) -> bytes:
        data: bytes = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))

    def encode(step: int, t: float, scalars: Mapping[str, float]) -> bytes:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        return record(Event(wall_time=t, step=step, summary=Summary(value=values)))

    return record(Event(wall_time=time.time(), file_version="brain.Event:2")), encode
