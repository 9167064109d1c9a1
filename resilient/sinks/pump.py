"""A pump feeds one sink: a thread that follows the run directory's files, and tries again what fails, for as long as it takes.

What a receiver refuses for good holds up nothing: after a few tries lines go one by one, and one that is refused by itself is
passed over. A failure that may be that of the receiver counts against a line once another one was taken after it, and the line is
passed over after a few of these. A receiver that takes nothing at all is waited for.
"""

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_never, wait_exponential_jitter

from resilient.sinks.base import Campaign, Factory, Line, NotTaken, Refused, Sink
from resilient.sinks.following import LineFile
from resilient.sinks.position import Position

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 2.0
LONGEST_PAUSE_S = 60.0
ENDING_PAUSE_S = 0.5  # between two tries once the job has ended
TRIES = 3  # that fail for one reason, before lines are tried one by one, and before one that fails by itself is passed over
MOST_TOLD = 20  # failures in other words that are told before it works again
WINDOW = 1000  # lines that are tried one by one, to see whether one that fails is to blame
_NOT_NOW = (NotTaken, OSError)  # say nothing of the lines


@dataclass
class _Failures:
    """Of one line by itself. Attributes: count: those after which another line was taken; last: the last one, in words."""

    count: int = 0
    last: str = ""


class Pump(threading.Thread):
    """Invariant: each line before what is kept of the position has been taken, or is one that the sink refuses.

    Args:
        make: makes the sink.
        settings: of the sink, as in the config.
        began_t: unix seconds at which the job began: a sink that wants no history begins there.
        ending: set when the job has ended: what is there is sent, and then the thread ends.

    Attributes:
        passed_over: lines that the sink refuses.
        last_failure: in words.
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
        self.last_failure = ""
        self._told: set[str] = set()  # failures since it has last worked
        self.passed_over = 0
        self._passed_over = 0  # of those before it failed
        self._taken_t = -float("inf")  # monotonic: when the sink has last taken anything
        self._went_well_t = -float("inf")  # monotonic: when a line by itself was done with
        self._failures: dict[int, _Failures] = {}  # of lines of one file that wait, by where they end
        self._since_t: dict[str, float] = {}  # of files of which nothing is read that was to be taken: lines before that are not

    @property
    def failing_s(self) -> float:
        """For how long nothing has gone well; 0 where all does."""
        failing_t = self._failing_t
        return 0.0 if failing_t is None else time.monotonic() - max(failing_t, self._went_well_t)

    def run(self) -> None:
        """Until the job has ended and all was taken."""
        position = self._insist(lambda: Position(self._campaign.run_dir, self.name, self._began_t))
        sink = self._insist(lambda: self._make(self._campaign, self._settings))
        if not sink.history:
            self._since_t = {name: position.since_t for name in sink.files if name not in position.at_bytes}
        if position.is_lost:
            since = "" if sink.history else time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(position.since_t))
            log.warning("%s: how far it has come cannot be read; all lines%s are sent, some of them again", self.name, since)
        files = [
            LineFile(self._campaign.run_dir / name, position.at_bytes.get(name, 0), position.newest_t.get(name))
            for name in sink.files
        ]
        while True:
            ending = self._ending.is_set()  # asked first: then all is there to be read
            if self._paused_s(sink) <= 0:
                for file in files:
                    while self._feed(sink, file, position):
                        pass
            self._refresh(sink)
            if ending:
                break
            self._ending.wait(POLL_S)
        self._insist(sink.close)
        position.close()

    def _feed(self, sink: Sink, file: LineFile, position: Position) -> bool:
        """Have the sink take what has come in a file; whether there was anything."""
        began_bytes = file.at_bytes
        lines = [line for line in self._insist(file.read) if self._goes(line, sink)]
        while lines:
            while (paused_s := self._paused_s(sink)) > 0:
                self._refresh(sink)
                self._ending.wait(min(paused_s, POLL_S))
            left = self._take(sink, lines)
            self._taken_t = time.monotonic()
            done = bisect_left(lines, left[0].end_bytes, key=lambda line: line.end_bytes) if left else len(lines)
            if done:
                self._keep(position, file, lines[done - 1].end_bytes)
            lines = list(left)
            if not done and len(lines) < WINDOW:  # those that are taken tell that those before them are refused
                lines += [line for line in self._come(file) if self._goes(line, sink)]
        has_come = file.at_bytes != began_bytes
        was_history = not has_come and file.at_bytes > 0 and self._since_t.pop(file.name, None) is not None
        if was_history or (has_come and file.name not in self._since_t):
            self._keep(position, file, file.at_bytes)
        return has_come

    def _take(self, sink: Sink, lines: Sequence[Line]) -> Sequence[Line]:
        """Have the sink take the first lines, but for those that it refuses; those of all that are left, in order."""
        try:
            self._insist(lambda: sink.take(lines[: sink.most]), until=_failed_by_the_lines(), meanwhile=sink)
        except Exception:  # noqa: BLE001 - of packages that are not the project's; it was logged
            return self._take_each(sink, lines)
        self._failures.clear()
        return lines[sink.most :]

    def _take_each(self, sink: Sink, lines: Sequence[Line]) -> Sequence[Line]:
        """As `_take`, one by one; also those behind the first ones, while one that failed waits for others to be taken."""
        failed: list[Line] = []  # since the sink has last taken one
        for index, line in enumerate(lines):
            if index >= (max(sink.most, WINDOW) if failed else sink.most):
                return [*failed, *lines[index:]]
            is_asked = False
            try:
                answer = self._ask(sink, line)
                is_asked = True
                if answer == "failed":
                    failed.append(line)
                elif answer == "taken":
                    self._ask_again(sink, failed)
            except _NOT_NOW as error:
                self._complain(error)
                return [*failed, *lines[index + is_asked :]]
        return failed

    def _ask_again(self, sink: Sink, failed: list[Line]) -> None:
        """Once a line was taken: try those that had made the sink fail, and leave in the list those that do so again.

        One that has failed so often, each time before another was taken, is passed over. Raises NotTaken or OSError.
        """
        known = [(line, self._failures[line.end_bytes]) for line in failed]
        for _, failures in known:
            failures.count += 1
        for line, failures in known:
            if failures.count >= TRIES:
                self._pass_over(line, failures.last)
            elif self._ask(sink, line) == "failed":
                continue
            failed.remove(line)

    def _ask(self, sink: Sink, line: Line) -> Literal["taken", "refused", "failed"]:
        """Have the sink take a line; one that it refuses is passed over. Raises NotTaken or OSError."""
        try:
            sink.take([line])
        except Refused as error:
            self._pass_over(line, f"{type(error).__name__}: {error}")
            return "refused"
        except _NOT_NOW:
            raise
        except Exception as error:  # noqa: BLE001 - of packages that are not the project's
            self._complain(error)
            self._failures.setdefault(line.end_bytes, _Failures()).last = self.last_failure
            return "failed"
        self._done_with(line)
        return "taken"

    def _done_with(self, line: Line) -> None:
        self._went_well_t = time.monotonic()
        self._failures.pop(line.end_bytes, None)

    def _come(self, file: LineFile) -> Sequence[Line]:
        """What has come in a file meanwhile. It is no sign that the sink works."""
        try:
            return file.read()
        except OSError as error:
            self._complain(error)
            return []

    def _pass_over(self, line: Line, why: str) -> None:
        """Told of the first, the second, the fourth, and so on."""
        self._done_with(line)
        self.passed_over += 1
        if self.passed_over & (self.passed_over - 1) == 0:
            at = f"the line of {line.file} that ends at byte {line.end_bytes}"
            log.warning("%s: %s is passed over, the %d. that is refused: %s", self.name, at, self.passed_over, why)

    def _keep(self, position: Position, file: LineFile, at_bytes: int) -> None:
        newest_t = {} if file.newest_t is None else {file.name: file.newest_t}
        self._insist(lambda: position.keep({**position.at_bytes, file.name: at_bytes}, {**position.newest_t, **newest_t}))

    def _goes(self, line: Line, sink: Sink) -> bool:
        """Whether the sink is to take a line: what was there before it was used is told by its time, until that is passed once."""
        if line.entry["t"] < self._since_t.get(line.file, 0.0):
            return False
        self._since_t.pop(line.file, None)
        return sink.wants(line)

    def _paused_s(self, sink: Sink) -> float:
        """How long the sink is to be left alone."""
        return 0.0 if self._ending.is_set() else self._taken_t + sink.pause_s - time.monotonic()

    # -- what fails ----------------------------------------------------------------------------------------------------

    def _insist(
        self, call: Callable[[], T], until: Callable[[RetryCallState], bool] = stop_never, meanwhile: Sink | None = None
    ) -> T:
        """Call until it does not raise, with growing pauses.

        Args:
            until: a failure after which it is raised.
            meanwhile: is refreshed in the pauses: a beat may go elsewhere than the lines that are not taken.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(Exception),
            wait=wait_exponential_jitter(initial=1.0, max=LONGEST_PAUSE_S),
            stop=until,
            sleep=lambda seconds: self._sleep(seconds, meanwhile),
            before_sleep=self._failed,
            reraise=True,
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

    def _sleep(self, seconds: float, sink: Sink | None) -> None:
        until_t = time.monotonic() + seconds
        while (left_s := until_t - time.monotonic()) > 0:
            if sink is not None:
                self._refresh(sink)
            if self._ending.wait(min(left_s, POLL_S)):
                time.sleep(ENDING_PAUSE_S)
                return

    def _failed(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if self._failing_t is None:
            self._failing_t, self._passed_over = time.monotonic(), self.passed_over
        if error is not None:
            self._complain(error)

    def _complain(self, error: BaseException) -> None:
        """Once for the same words, until it works again."""
        self.last_failure = words = f"{type(error).__name__}: {error}"
        if words not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(words)
            log.warning("%s: %s", self.name, words)

    def _works(self) -> None:
        if self._failing_t is not None:
            left_out = self.passed_over - self._passed_over
            what = f"{left_out} lines were passed over" if left_out else "nothing was left out"
            log.warning("%s: works again after %.0f s; %s", self.name, time.monotonic() - self._failing_t, what)
            self._failing_t, self.last_failure = None, ""
            self._told.clear()


def _failed_by_the_lines() -> Callable[[RetryCallState], bool]:
    """Whether what is tried has failed so often on end in a way that may be due to what is sent."""
    count = 0

    def failed(state: RetryCallState) -> bool:
        nonlocal count
        error = state.outcome.exception() if state.outcome is not None else None
        count = 0 if isinstance(error, _NOT_NOW) else count + 1
        return count >= TRIES

    return failed
