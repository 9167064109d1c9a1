"""The thread of the disk process that writes items and renews the lease. It alone may stand still because the run directory does.

Items are written in order and tried again until they are written; the driver is told what is wrong, and when it is over.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from checkpoint.framing import Message
from resilient import spill
from resilient.driver.lease import RENEW_S, SURE_S, RunLease
from resilient.driver.past_writer import PastWriter
from resilient.driver.rundir import RunDirFiles
from resilient.driver.tensorboard import ScalarFile
from resilient.protocol.disk import (
    Answer,
    CloseFiles,
    DiskSettings,
    Item,
    Renewed,
    TakeInLeft,
    TakenOver,
    WriteFailed,
    WriteWorks,
    Written,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between tries of what failed
TAKE_IN_PAUSE_S = 1.0  # between tries of what agents have left
GATHER_S = 0.01  # between two batches
KEEP_PATIENCE_S = 1.0  # at the end; what is not kept then is read by the next reader
SCALARS_PATIENCE_S = 2.0  # at the end, before the driver is answered
ORPHAN_S = 5.0  # what is to be written after the driver's end, points for TensorBoard included


class DiskThread:
    """Invariant: `_items` and `_calls` are changed under `_changed` only; everything else belongs to the thread.

    Args:
        pid: of the driver.
        send: sends news to the driver, from any thread.
    """

    def __init__(self, settings: DiskSettings, pid: int, send: Callable[[Message], None]) -> None:
        run_dir, scalars = Path(settings.run_dir), settings.scalars
        self._run_dir = run_dir
        self._send = send
        self._lease = RunLease.adopted(run_dir, settings.token, settings.lock_fd, pid)
        self._scalars = ScalarFile(run_dir, scalars.queue_size, scalars.interval) if scalars is not None else None
        self._files = RunDirFiles(run_dir, self._scalars, settings.lock_fd)
        self._past_writer = PastWriter(run_dir)
        self._changed = threading.Condition()
        self._items: deque[Item] = deque()
        self._put = 0  # items so far
        self._calls: deque[tuple[TakeInLeft | CloseFiles, int]] = deque()  # and after how many items
        self._failed: str | None = None
        self._pause_s = FIRST_PAUSE_S
        self._left_failed: str | None = None  # why what agents have left could not be taken in
        self._left_again_t = 0.0  # monotonic: when that is tried again
        self._orphaned = False
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-directory", daemon=True)
        self._thread.start()

    def put(self, items: tuple[Item, ...]) -> None:
        """Write these."""
        with self._changed:
            self._items.extend(items)
            self._put += len(items)
            self._changed.notify()

    def call(self, call: TakeInLeft | CloseFiles) -> None:
        """Do this once all items are written that were put before."""
        with self._changed:
            self._calls.append((call, self._put))
            self._changed.notify()

    def orphaned(self) -> None:
        """The driver is gone: write what there is, then end."""
        with self._changed:
            self._orphaned = True
            self._changed.notify()

    def _run(self) -> None:
        batch: deque[Item] = deque()
        while not self.over.is_set():
            with self._changed:
                idle = not (batch or self._items or self._callable or self._orphaned)
                if idle:
                    self._changed.wait(self._rest_s)
                batch.extend(self._items)
                self._items.clear()
                orphaned = self._orphaned
            try:
                if not self._turn(batch):
                    return
                if orphaned and not batch:
                    self.over.set()
            except OSError as error:
                self._fail(error)
                if orphaned:
                    self.over.set()  # what it could not write is in the spill file, or was never acknowledged

    @property
    def _callable(self) -> bool:
        """Whether a call can be done now: the first one, unless it has failed a moment ago and holds up no other."""
        return len(self._calls) > 1 or (bool(self._calls) and self._again_s <= 0)

    @property
    def _again_s(self) -> float:
        """Until the first call, if it has failed, is tried again."""
        return self._left_again_t - time.monotonic() if isinstance(self._calls[0][0], TakeInLeft) else 0.0

    @property
    def _rest_s(self) -> float:
        """For how long there is nothing to do, if nothing comes."""
        renew_s = max(0.0, RENEW_S - self._lease.unseen_s)
        return min(renew_s, max(0.0, self._again_s)) if self._calls else renew_s

    def _turn(self, batch: deque[Item]) -> bool:
        """Write a batch; whether this driver still has the lease."""
        if self._lease.unseen_s >= (SURE_S if batch else RENEW_S) and not self._renew():
            return False
        number = batch[-1].number if batch else 0
        self._files.write(batch)
        if number:
            self._send(Written(number=number))
            self._past_writer.written()
        if self._lease.unseen_s >= RENEW_S and not self._renew():
            return False
        if self._failed is not None:
            self._failed, self._pause_s = None, FIRST_PAUSE_S
            self._send(WriteWorks())
        if number:
            time.sleep(GATHER_S)
        self._answer()
        return True

    def _renew(self) -> bool:
        other = self._lease.renew()
        if other is not None:
            self._send(TakenOver(owner=str(other)))
            self.over.set()
            return False
        self._send(Renewed())
        return True

    def _fail(self, error: OSError) -> None:
        self._files.unsettle()
        detail = error.strerror or str(error)
        if detail != self._failed:
            self._failed = detail
            self._send(WriteFailed(detail=detail))
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _answer(self) -> None:
        """Do the next call, once what was put before it is written; items that come all the time do not hold it up."""
        call, answer = None, None
        with self._changed:
            if self._callable and self._put - len(self._items) >= self._calls[0][1]:
                call = self._calls[0][0]
        match call:
            case TakeInLeft():
                answer = self._take_in(call)
            case CloseFiles():
                answer = self._close(call)
        if answer is None:
            return
        with self._changed:
            self._calls.popleft()
        self._send(answer)
        if isinstance(call, CloseFiles):
            if self._scalars is not None:
                self._scalars.finish(ORPHAN_S)
            self.over.set()

    def _take_in(self, call: TakeInLeft) -> Answer | None:
        """None where it failed and is tried again, which holds up no other call."""
        try:
            spill.take_in(self._run_dir, self._files)
        except OSError as error:
            self._files.unsettle()
            self._left_again_t = time.monotonic() + TAKE_IN_PAUSE_S
            if str(error) != self._left_failed:
                self._left_failed = str(error)
                log.warning("what agents have left in %s cannot be taken in: %s", self._run_dir, error)
            with self._changed:
                holds_up = len(self._calls) > 1
            return Answer(call=call.call, error=str(error)) if holds_up else None
        self._left_failed, self._left_again_t = None, 0.0
        return Answer(call=call.call)

    def _close(self, call: CloseFiles) -> Answer:
        self._files.close()
        if self._scalars is not None:
            self._scalars.finish(SCALARS_PATIENCE_S)
        self._past_writer.finish(KEEP_PATIENCE_S)
        with contextlib.suppress(OSError):
            self._lease.close()
        return Answer(call=call.call)
