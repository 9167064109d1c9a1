"""What an agent reports to its driver regularly: heartbeats, records and the daemon's news, combined into `Report`.

Owns when a report is due, and the records that the driver has not acknowledged yet.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from checkpoint.protocol import DaemonNews
from resilient.agent.limits import PROMPT_S, QUIET_S, REGION_POLL_S, UNWATCHED_S
from resilient.agent.workers import Workers
from resilient.heartbeat import region as heartbeat_region
from resilient.heartbeat.agent_side import AgentRegion
from resilient.protocol.messages import Heartbeat, Record, Report

RECORDS_BYTES = 1 << 20
"""Of records in one report, about; a report must not come near `checkpoint.framing.LINE_LIMIT_BYTES`."""

Send = Callable[[Report, bool], bool]
"""Sends a report; whether it may be dropped where the driver is slow to read; returns whether it was sent."""


def record_of(rank: int, record: heartbeat_region.Record) -> Record:
    """A record as a message has it."""
    return Record(rank, record.t, record.event, dict(record.fields))


def sendable(record: Record) -> Record:
    """The record as it can be sent: what JSON proper has no word for (NaN, above all) goes as text, and the driver has it whole."""
    try:
        json.dumps(record.fields, allow_nan=False)
        msgspec.json.encode(record.fields)
    except (TypeError, ValueError, OverflowError):  # UnicodeEncodeError is a ValueError
        as_text = Record(record.rank, record.t, record.event, {}, json.dumps(record.fields, default=str))
        msgspec.structs.force_setattr(as_text, "fields", {})
        return as_text
    return record


class Reports:
    """Invariants: records are sent in the order in which they were read, each once, and stay in `unwritten` until the driver has
    acknowledged them. Those of a step go before or with the heartbeat that says that it is finished, and with the news of its
    snapshot.

    Args:
        send: sends a report.
        generation: the present one.
        clock: seconds, any origin.

    Attributes:
        report_s: seconds between two reports, as the driver wants it; at most one report is sent in that time, as long as nothing
            happens that is told at once.
    """

    def __init__(self, send: Send, generation: Callable[[], int], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._generation, self._clock = send, generation, clock
        self._workers: Workers | None = None
        self._news: list[DaemonNews] = []
        self._unwritten: deque[tuple[Record, int, AgentRegion, int]] = deque()
        self._reported: dict[int, tuple[float, str]] = {}
        self._polled_t = self._heartbeats_t = self._sent_t = float("-inf")
        self.report_s = PROMPT_S

    def begin(self, workers: Workers, report_s: float) -> None:
        """A generation's workers have started."""
        self._workers, self.report_s = workers, min(report_s, QUIET_S)
        self._reported = {}
        self._polled_t = self._clock() - self._poll_s

    def end(self) -> None:
        """The workers have ended, and their regions are about to go: the last records of theirs are sent."""
        self._report({}, last=True)
        self._workers = None

    @property
    def unwritten(self) -> dict[int, list[Record]]:
        """What the driver has not acknowledged, by generation."""
        found: dict[int, list[Record]] = {}
        for record, generation, _, _ in self._unwritten:
            found.setdefault(generation, []).append(record)
        return found

    def collect(self) -> None:
        """Take what the workers have left, without sending it. They have ended."""
        for _ in self._records(last=True):
            pass

    def add_news(self, news: Sequence[DaemonNews]) -> None:
        """The daemon has said something."""
        self._news += news
        if news and self.report_s <= PROMPT_S:
            self.flush()

    def due_in_s(self) -> float:
        """Until the heartbeat regions are to be read."""
        return max(0.0, self._polled_t + self._poll_s - self._clock())

    @property
    def _poll_s(self) -> float:
        return max(REGION_POLL_S, self.report_s)

    def report(self) -> None:
        """Read the heartbeat regions, and report all that is new."""
        assert self._workers is not None
        now = self._clock()
        if now - self._polled_t > self._poll_s + UNWATCHED_S:
            self._workers.watch_from_now()
        self._polled_t = now
        heartbeats = self._workers.heartbeats()
        news = {rank: (each.activity_t, each.state) for rank, each in heartbeats.items()}
        if news == self._reported and now - self._heartbeats_t < QUIET_S:
            self.flush()
        elif self._report(heartbeats):
            self._reported, self._heartbeats_t = news, now

    def flush(self) -> None:
        """Report the records and the news that there are, without heartbeats; nothing is sent where there are none."""
        self._report({})

    def tick(self) -> None:
        """Where nobody reads heartbeats, or not for a while: news is reported all the same."""
        patience_s = self.report_s if self._workers is None else 2 * self._poll_s
        if self._news and self._clock() - self._sent_t >= patience_s:
            self.flush()

    def written(self, count: int) -> None:
        """The oldest records that were sent are durable: their room in the regions is free."""
        for _ in range(min(count, len(self._unwritten))):
            _, _, region, end = self._unwritten.popleft()
            region.keep(end)

    def _report(self, heartbeats: Mapping[int, Heartbeat], *, last: bool = False) -> bool:
        """Whether the heartbeats were sent."""
        *full, records = list(_in_parts(self._records(last=last))) or [()]
        for part in full:
            self._send(Report(generation=self._generation(), records=part), False)
        news, self._news = tuple(self._news), []
        if not (heartbeats or records or news):
            return True
        report = Report(generation=self._generation(), heartbeats=heartbeats, records=records, news=news)
        sent = self._send(report, not records and not news)
        if sent:
            self._sent_t = self._clock()
        return sent

    def _records(self, *, last: bool) -> Iterator[Record]:
        """The new ones; from now on they are among those that are not acknowledged."""
        for rank, found, region in self._workers.take_records(last=last) if self._workers is not None else ():
            record = record_of(rank, found)
            self._unwritten.append((record, self._generation(), region, found.end))
            yield sendable(record)


def _in_parts(records: Iterable[Record]) -> Iterator[tuple[Record, ...]]:
    part: list[Record] = []
    size = 0
    for record in records:
        part.append(record)
        size += len(msgspec.json.encode(record))
        if size >= RECORDS_BYTES:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)
