"""A pump feeds one sink: a thread that follows the run directory's files, and tries again what fails, for as long as it takes."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential_jitter

from resilient.sinks.base import Campaign, Factory, Line, Sink
from resilient.sinks.following import LineFile
from resilient.sinks.position import Position

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 2.0
LONGEST_PAUSE_S = 60.0
ENDING_PAUSE_S = 0.5  # between two tries once the job has ended


class Pump(threading.Thread):
    """Invariant: no line before what is kept of the position has not been taken.

    Args:
        make: makes the sink.
        settings: of the sink, as in the config.
        began_t: unix seconds at which the job began: a sink that wants no history begins there.
        ending: set when the job has ended: what is there is sent, and then the thread ends.
    """

    def __init__(
        self, name: str, make: Factory, campaign: Campaign, settings: Mapping[str, Any], *, began_t: float, ending: threading.Event
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._make = make
        self._campaign = campaign
        self._settings = settings
        self._began_t = began_t
        self._ending = ending
        self._failing_t: float | None = None  # monotonic
        self._said = ""
        self._taken_t = -float("inf")  # monotonic: when the sink has last taken anything

    def run(self) -> None:
        """Until the job has ended and all was taken."""
        position = self._insist(lambda: Position(self._campaign.run_dir, self.name, self._began_t))
        sink = self._insist(lambda: self._make(self._campaign, self._settings))
        since_t = 0.0 if sink.history else position.since_t
        files = [LineFile(self._campaign.run_dir / name, position.at_bytes.get(name, 0)) for name in sink.files]
        while True:
            ending = self._ending.is_set()  # asked first: then all is there to be read
            if self._paused_s(sink) <= 0:
                for file in files:
                    while self._feed(sink, file, position, since_t):
                        pass
            self._refresh(sink)
            if ending:
                break
            self._ending.wait(POLL_S)
        self._insist(sink.close)
        position.close()

    def _feed(self, sink: Sink, file: LineFile, position: Position, since_t: float) -> bool:
        """Have the sink take what has come in a file; whether there was anything."""
        began_bytes = file.at_bytes
        lines = [line for line in self._insist(file.read) if self._goes(line, sink, since_t)]
        while lines:
            while (paused_s := self._paused_s(sink)) > 0:
                self._refresh(sink)
                self._ending.wait(min(paused_s, POLL_S))
            some, lines = lines[: sink.most], lines[sink.most :]
            self._insist(lambda some=some: sink.take(some))  # type: ignore[misc]
            self._taken_t = time.monotonic()
            self._keep(position, file.name, some[-1].end_bytes)
        if file.at_bytes > began_bytes:
            self._keep(position, file.name, file.at_bytes)
        return file.at_bytes > began_bytes

    def _keep(self, position: Position, file: str, at_bytes: int) -> None:
        self._insist(lambda: position.keep({**position.at_bytes, file: at_bytes}))

    def _goes(self, line: Line, sink: Sink, since_t: float) -> bool:
        return line.entry["t"] >= since_t and sink.wants(line)

    def _paused_s(self, sink: Sink) -> float:
        """How long the sink is to be left alone."""
        return 0.0 if self._ending.is_set() else self._taken_t + sink.pause_s - time.monotonic()

    # -- what fails ----------------------------------------------------------------------------------------------------

    def _insist(self, call: Callable[[], T]) -> T:
        """Call until it does not raise, with growing pauses."""
        retrying = Retrying(
            retry=retry_if_exception_type(Exception),
            wait=wait_exponential_jitter(initial=1.0, max=LONGEST_PAUSE_S),
            sleep=self._sleep,
            before_sleep=self._failed,
        )
        result: T = retrying(call)
        self._works()
        return result

    def _refresh(self, sink: Sink) -> None:
        """Not insisted upon: it comes again, and lines do not wait for it."""
        try:
            sink.refresh()
        except Exception as error:  # noqa: BLE001 - of packages that are not the project's
            self._complain(error)

    def _sleep(self, seconds: float) -> None:
        if self._ending.wait(seconds):
            time.sleep(ENDING_PAUSE_S)

    def _failed(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if self._failing_t is None:
            self._failing_t = time.monotonic()
        if error is not None:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        """Once for the same words on end."""
        words = f"{type(error).__name__}: {error}"
        if words != self._said:
            self._said = words
            log.warning("%s: %s", self.name, words)

    def _works(self) -> None:
        if self._failing_t is not None:
            log.warning("%s: works again after %.0f s; nothing was left out", self.name, time.monotonic() - self._failing_t)
            self._failing_t, self._said = None, ""
