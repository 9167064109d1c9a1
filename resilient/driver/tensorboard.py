"""TensorBoard: every number of the metrics as a scalar over the step, written by the driver, so that no restart leaves a gap.

tensorboard takes a while to import; that happens in a thread once there is something to write, so that a start does not wait for
it, and what comes in the meantime is kept.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_UNITS = {"step", "generation", "t"}


class ScalarWriter:
    """Writes scalars from its own thread; `close` waits until all are on disk.

    Args:
        directory: where event files go.
        queue_size: scalars that are kept before they are written.
        interval: of the metrics, only every so many steps.
    """

    def __init__(self, directory: Path, queue_size: int = 10, interval: int = 1) -> None:
        self._queue_size, self._interval = queue_size, interval
        self._queue: queue.SimpleQueue[tuple[int, float, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(directory,), name="tensorboard", daemon=True)
        self._thread.start()

    def metrics(self, line: Mapping[str, object]) -> None:
        """A line of metrics."""
        step = line.get("step")
        if isinstance(step, int) and step % self._interval == 0:
            self._put("train", line)

    def event(self, line: Mapping[str, object]) -> None:
        """A line of the ledger; of these, validations have scalars."""
        if line["event"] == "validation":
            self._put("validation", line)

    def _put(self, group: str, line: Mapping[str, object]) -> None:
        step, t = line.get("step"), line["t"]
        if not isinstance(step, int) or not isinstance(t, float):
            return
        scalars = {
            f"{group}/{name}": float(value)
            for name, value in line.items()
            if name not in _UNITS and isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._queue.put((step, t, scalars))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=10.0)

    def _write(self, directory: Path) -> None:
        item = self._queue.get()
        if item is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        with contextlib.closing(EventFileWriter(str(directory), self._queue_size, flush_secs=5)) as writer:
            while item is not None:
                step, t, scalars = item
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
                writer.add_event(Event(wall_time=t or time.time(), step=step, summary=Summary(value=values)))
                item = self._queue.get()
