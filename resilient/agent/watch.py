"""While workers run: what the driver wants of them, what they report, and how they end."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from resilient.agent.limits import INSPECT_S, LAST_WORDS_S, OUTPUT_POLL_S, OUTPUT_S, STANDBY_AGAIN_S, STANDBY_S, WRITING_POLL_S
from resilient.agent.loop import Loop
from resilient.agent.reports import Reports
from resilient.agent.standby import Standbys
from resilient.agent.workers import Workers
from resilient.protocol.messages import (
    AgentMessage,
    Arm,
    DriverMessage,
    EndsFound,
    FindEnds,
    Inspect,
    Inspected,
    Propose,
    Proposed,
    Start,
    Stop,
    WorkerEnded,
)
from resilient.recovery.faults import INCIDENTS

log = logging.getLogger(__name__)

Next = Callable[[float, Sequence[int]], tuple[DriverMessage | None, bool]]
"""Waits for a message so many seconds, or until one of these descriptors is readable; returns the message, and whether one is."""


class Watch:
    """The watch of one generation's workers. What the driver says of a generation that is over is ignored.

    Args:
        start: the generation.
        next_message: runs the loop.
        send: sends a message; the records so far go before it.
        run_dir: where last words go.
    """

    def __init__(
        self,
        start: Start,
        workers: Workers,
        *,
        loop: Loop,
        reports: Reports,
        standbys: Standbys,
        next_message: Next,
        send: Callable[[AgentMessage], None],
        run_dir: Path,
    ) -> None:
        self._generation = start.generation
        self._workers, self._loop, self._reports, self._standbys = workers, loop, reports, standbys
        self._next, self._send, self._run_dir = next_message, send, run_dir
        self._began_t = time.monotonic()
        self._standby_t = 0.0  # monotonic: no standby is forked before

    def run(self) -> None:
        """Watch the workers and answer the driver until it says stop."""
        reports, ended = self._reports, False
        while True:
            message, one_ended = self._next(reports.due_in_s(), self._workers.sentinels())
            ended |= one_ended
            if message is not None and message.generation >= self._generation and not self._obey(message):
                return
            if message is None and not ended and reports.due_in_s() > 0:
                continue  # woken by what is none of the workers' business
            reports.report()
            self._stand_by()
            if ended or self._workers.silent:
                self._report_ends(early=self._workers.silent)
                ended = False

    def _obey(self, message: DriverMessage) -> bool:
        """Whether the workers are to go on."""
        match message:
            case Stop(incident=incident, writing_s=writing_s):
                if incident is not None:
                    self._take_last_words(self._run_dir / INCIDENTS / incident)
                self._loop.wait_until(lambda: not self._workers.writing(), writing_s, poll_s=WRITING_POLL_S)
                return False
            case Propose(reason=reason):
                self._send(Proposed(generation=self._generation, checked=self._workers.propose(reason)))
            case Arm(target=target):
                self._workers.arm(target)
            case Inspect(early=early):
                inspecting = self._loop.in_thread(lambda: self._workers.inspect(early=early), "inspection")
                found = inspecting.result() if self._loop.wait_until(inspecting.done, INSPECT_S) else {}
                self._send(Inspected(generation=self._generation, ranks=found))
            case FindEnds():
                self._report_ends(early=True)
                self._send(EndsFound(generation=self._generation))
        return True

    def _report_ends(self, *, early: bool = False) -> None:
        """What a worker has printed last is evidence: it is read to its end before. Args: early: see `Workers.note_ends`."""
        self._loop.wait_until(lambda: self._workers.note_ends(early=early), OUTPUT_S, poll_s=OUTPUT_POLL_S)
        for end in self._workers.reap():
            stopped = self._workers.activities()[end.rank].stopped
            self._send(WorkerEnded(generation=self._generation, end=end, stopped=stopped))

    def _take_last_words(self, folder: Path) -> None:
        """They are written to the run directory: a file system that stands still keeps nobody alive for it."""
        taking = self._loop.in_thread(lambda: self._workers.last_words(folder), "last words")
        if not self._loop.wait_until(taking.done, LAST_WORDS_S):
            log.warning("the last words of the workers are not in %s within %.0f s", folder, LAST_WORDS_S)

    def _stand_by(self) -> None:
        """Fork ahead what a restart would need, one process at a time, once the ranks no longer need the time themselves."""
        now_t = time.monotonic()
        if now_t < self._standby_t or not (self._workers.underway or now_t - self._began_t > STANDBY_S):
            return
        role = self._standbys.missing(self._workers.roles)
        if role is None:
            return
        try:
            self._standbys.fork(role)
        except OSError as error:  # the ranks compute: a restart would start without it
            log.warning("no standby for rank %d can be had, trying again in %.0f s: %s", role.rank, STANDBY_AGAIN_S, error)
            self._standby_t = now_t + STANDBY_AGAIN_S
