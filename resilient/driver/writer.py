"""The writer: what is to be in the run directory, until it is there. Nobody waits for it, whatever the file system does.

Items go to the disk process (`resilient.driver.disk`), which writes them in order. What it has not written after a second, or what
is more than memory should hold, goes to a spill file in RAM, and counts as kept from then on; once the run directory works again it
is read back from there. Items that wait are in one place: in memory, or in the spill file, whose items are the older ones.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resilient import clock, ledger
from resilient.driver.disk_client import DiskClient, report
from resilient.driver.driver_log import DriverLog
from resilient.driver.lease import RENEW_S
from resilient.driver.spill_file import SpillFile
from resilient.logs.paths import DRIVER_LOG
from resilient.protocol.disk import (
    Answer,
    Call,
    CloseFiles,
    DiskNews,
    DiskSettings,
    Item,
    Renewed,
    Serving,
    TakeInLeft,
    TakenOver,
    WriteFailed,
    WriteItems,
    WriteWorks,
    Written,
)

log = logging.getLogger(__name__)

TICK_S = 0.25
SPILL_AFTER_S = 1.0
MEMORY_BYTES = 8 << 20
IN_FLIGHT_BYTES = 1 << 20  # to the disk process at a time
STALL_S = 2.0  # without an answer of the run directory
START_S = 20.0  # of the disk process, on a machine where all processes start at once
FLUSH_POLL_S = 0.02
AWAY_S = 1.0  # between two ticks: this process was stopped, and answers may lie in its sockets


@dataclass(frozen=True)
class Listeners:
    """Who is told what.

    Attributes:
        trouble: what is wrong, and since when, unix seconds.
        well: for how many seconds it was.
        taken_over: who has the lease now.
        defect: an error that nobody has thought of; nothing is written any more.
    """

    trouble: Callable[[str, float], None]
    well: Callable[[float], None]
    taken_over: Callable[[str], None]
    defect: Callable[[BaseException], None]


class Writer:
    """Belongs to the event loop. Args: log: what was said goes to the run directory, too; None: nothing is.

    Invariants: numbers of items are consecutive; `_written` <= `_sent`; items in memory are those after the last that was spilled,
    or after `_written` where the spill file is empty; callbacks are in the order of their numbers.
    """

    def __init__(self, settings: DiskSettings, spill: SpillFile, listeners: Listeners, log: DriverLog | None = None) -> None:
        self._disk = DiskClient(settings, self._hear, self._started, listeners.defect)
        self.spill = spill
        self._listeners = listeners
        self._log = log or DriverLog()
        self._items: deque[Item] = deque()
        self._memory_bytes = 0
        self._next = 1
        self._sent = 0
        self._written = 0
        self._kept: deque[tuple[int, Callable[[], None]]] = deque()
        self._oldest_t: float | None = None  # monotonic: since when the oldest item in memory waits
        self._answered_t = 0.0  # monotonic: when the disk process last said that the run directory works
        self._ticked_t = 0.0
        self._failed: str | None = None  # what the disk process has told
        self._trouble_t: float | None = None  # unix seconds: since when there is trouble
        self._spill_failed = False
        self._ticking: asyncio.Task[None] | None = None

    # -- what is to be written -----------------------------------------------------------------------------------------

    def event(self, entry: Mapping[str, object]) -> None:
        """A line of the ledger, see `ledger.event_entry`."""
        self._put(ledger.EVENTS, ledger.encoded(entry).decode())

    def metrics(self, entry: Mapping[str, object]) -> None:
        """A line of metrics, see `ledger.metrics_entry`."""
        self._put(ledger.METRICS, ledger.encoded(entry).decode())

    def text(self, path: str, text: str) -> None:
        """A whole file. Args: path: below the run directory."""
        self._put(path, text, whole=True)

    def written(self, then: Callable[[], None]) -> None:
        """Call this once all that was given before is in the run directory, or in the spill file."""
        self._kept.append((self._next - 1, then))
        self._report_kept()

    def _put(self, path: str, text: str, *, whole: bool = False) -> None:
        self._items.append(Item(self._next, path, text, whole))
        self._next += 1
        self._memory_bytes += len(text)
        if self._oldest_t is None:
            self._oldest_t = time.monotonic()
        self._feed()

    # -- the way to the disk -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the disk process; what agents have left is taken in first."""
        self._answered_t = time.monotonic() + START_S
        self._log.begin()
        self._disk.start()
        self._ticking = asyncio.create_task(self._tick_on())
        self._ticking.add_done_callback(lambda task: report(task, self._listeners.defect))

    async def _tick_on(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    def _started(self) -> None:
        self._sent = self._written
        self._failed = None
        self.spill.rewind()
        self._disk.send(TakeInLeft(call=0))
        self._feed()

    def _feed(self) -> None:
        """Send the next items, unless the disk process has not written the last ones yet, or there is none."""
        if self._sent > self._written or not self._disk.connected:
            return
        batch: list[Item] = []
        while not batch and not self.spill.empty and self._sent < self.spill.last:
            batch = [item for item in self.spill.read() if item.number > self._sent]
        if not batch:
            size_bytes = 0
            for item in self._items:
                if size_bytes > IN_FLIGHT_BYTES:
                    break
                size_bytes += len(item.text)
                batch.append(item)
        if batch and self._disk.send(WriteItems(items=tuple(batch))):
            self._sent = batch[-1].number
            self._answered_t = max(self._answered_t, time.monotonic())

    def _hear(self, news: DiskNews) -> None:
        match news:
            case Written(number=number):
                self._answered_t = time.monotonic()
                self._on_written(number)
            case Renewed() | Serving():
                self._answered_t = time.monotonic()
            case WriteFailed(detail=detail):
                self._failed = detail
                self._begin_trouble(detail, clock.now())
            case WriteWorks():
                self._failed = None
            case TakenOver(owner=owner):
                self._listeners.taken_over(owner)
        if self._failed is None and isinstance(news, Written | Renewed | WriteWorks):
            self._end_trouble()

    def _on_written(self, number: int) -> None:
        self._written = max(self._written, number)
        while self._items and self._items[0].number <= number:
            self._memory_bytes -= len(self._items.popleft().text)
        self._oldest_t = time.monotonic() if self._items else None
        if not self.spill.empty and self._written >= self.spill.last:
            self.spill.remove()
        self._report_kept()
        self._feed()

    # -- when it takes long --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed."""
        self._take_log()
        now = time.monotonic()
        if now - self._ticked_t > AWAY_S:
            self._answered_t = max(self._answered_t, now)
            self._oldest_t = now if self._oldest_t is not None else None
        self._ticked_t = now
        late = self._oldest_t is not None and now - self._oldest_t >= SPILL_AFTER_S
        if self._items and (late or self._memory_bytes > MEMORY_BYTES):
            self.spill_now()
        if now - self._answered_t > (STALL_S if self._sent > self._written else RENEW_S + STALL_S):
            self._begin_trouble("it does not answer", clock.now() - (now - self._answered_t))
        self._feed()

    def _take_log(self) -> None:
        for text in self._log.take():
            self._put(DRIVER_LOG, text)

    def spill_now(self) -> None:
        """Put what is in memory into the spill file; it counts as kept."""
        fresh = [item for item in self._items if item.number > max(self.spill.last, self._written)]
        try:
            if fresh:
                self.spill.append(fresh)
        except OSError as error:
            if not self._spill_failed:
                self._spill_failed = True
                log.warning("the spill file %s cannot be written, records stay in memory: %s", self.spill.path, error)
            self._oldest_t = time.monotonic()
            return
        self._spill_failed = False
        self._items.clear()
        self._memory_bytes, self._oldest_t = 0, None
        self._report_kept()

    def _report_kept(self) -> None:
        kept = max(self._written, self.spill.last)
        while self._kept and self._kept[0][0] <= kept:
            self._kept.popleft()[1]()

    @property
    def trouble_s(self) -> float | None:
        """For how long the run directory has not worked; None while it does."""
        return None if self._trouble_t is None else clock.now() - self._trouble_t

    def _begin_trouble(self, detail: str, since_t: float) -> None:
        if self._trouble_t is None:
            self._trouble_t = since_t
            self._listeners.trouble(detail, since_t)

    def _end_trouble(self) -> None:
        if self._trouble_t is not None:
            down_s, self._trouble_t = clock.now() - self._trouble_t, None
            self._listeners.well(down_s)

    # -- calls, and the end --------------------------------------------------------------------------------------------

    async def call(self, make: Callable[[int], Call], timeout_s: float, *, again: bool = False) -> Answer:
        """Have the disk process do something, see `resilient.protocol.disk` and `DiskClient.call`."""
        return await self._disk.call(make, timeout_s, again=again)

    async def flush(self, patience_s: float) -> bool:
        """Whether all that was given is in the run directory; waits for that, as long as the run directory gets on."""
        self._take_log()
        last = self._next - 1
        deadline = time.monotonic() + patience_s
        seen = self._written
        while self._written < last and time.monotonic() < deadline:
            await asyncio.sleep(FLUSH_POLL_S)
            if self._written > seen:
                seen, deadline = self._written, time.monotonic() + patience_s
        return self._written >= last

    async def close(self, patience_s: float, *, take_in: bool = True) -> bool:
        """Have everything written and the lease given up; whether that was done. What was not written stays in the spill file.

        Args:
            patience_s: for a run directory that does not get on.
            take_in: also what agents have left.
        """
        done = await self.flush(patience_s)
        if done:
            taken_in = not take_in or (await self.call(lambda number: TakeInLeft(call=number), patience_s)).error is None
            done = (await self.call(lambda number: CloseFiles(call=number), patience_s)).error is None and taken_in
        self._stop_ticking()
        if self._items:
            self.spill_now()
        await self._disk.close()
        if not self.spill.empty:
            self.spill.close()
            return False
        return done

    async def abandon(self) -> None:
        """Another driver has the lease: nothing more is written. What is in the spill file waits for the next one here."""
        self._stop_ticking()
        self._log.abandon()
        self.spill.close()
        await self._disk.close()

    def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    @property
    def disk_pid(self) -> int | None:
        return self._disk.pid
