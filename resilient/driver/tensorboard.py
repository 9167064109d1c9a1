"""TensorBoard: every number of the metrics as a scalar over the step, written beside the ledger, so that no restart leaves a gap.

Owns one file of events. tensorboard takes a while to import, perhaps from a file system that stalls: that happens in a thread once
there is something to write, and what comes in the meantime is kept. A record is whole or not there: after a failure the file is cut
back to its last whole record.
"""

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FLUSH_S = 5.0
KEPT = 100_000  # scalars' lines that wait for a file that cannot be written; older ones are left out
_MOST = 1e300  # whole numbers have no limit
_UNITS = {"step", "generation", "t"}

Encode = Callable[[int, float, Mapping[str, float]], bytes]


class ScalarFile:
    """Belongs to one thread.

    Invariant: the first `_end_bytes` of the file are whole records.

    Args:
        directory: where event files go.
        queue_size: lines that are kept before they are written, for 5 s at most.
        interval: of the metrics, only every so many steps.
    """

    def __init__(self, directory: Path, queue_size: int = 10, interval: int = 1) -> None:
        self._path = directory / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._queue_size, self._interval = queue_size, interval
        self._pending: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=KEPT)
        self._flushed_t = time.monotonic()
        self._end_bytes = 0
        self._encode: Encode | None = None
        self._header = b""
        self._importing: threading.Thread | None = None

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
        self._pending.append((step, t, scalars))
        if self._importing is None:
            self._importing = threading.Thread(target=self._import, name="tensorboard", daemon=True)
            self._importing.start()

    def _import(self) -> None:
        """In its own thread."""
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

        self._header = record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._encode = encode

    @property
    def due(self) -> bool:
        """Whether `flush` has something to do now."""
        late = time.monotonic() - self._flushed_t >= FLUSH_S
        return self._encode is not None and bool(self._pending) and (late or len(self._pending) >= self._queue_size)

    def flush(self) -> None:
        """Write what is kept. Raises OSError: it is still kept."""
        if self._encode is None or not self._pending:
            return
        waiting = tuple(self._pending)
        self._path.parent.mkdir(exist_ok=True)
        fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size < self._end_bytes:
                self._end_bytes = 0  # it is another file
            if os.fstat(fd).st_size > self._end_bytes:
                os.ftruncate(fd, self._end_bytes)
            data = memoryview((b"" if self._end_bytes else self._header) + b"".join(self._encode(*each) for each in waiting))
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], self._end_bytes + done)
        finally:
            os.close(fd)
        self._end_bytes += done
        self._flushed_t = time.monotonic()
        for _ in waiting:
            self._pending.popleft()

    def close(self) -> None:
        """Write what is kept, once tensorboard is imported. Raises OSError."""
        if self._importing is not None:
            self._importing.join(timeout=10.0)
        self.flush()
