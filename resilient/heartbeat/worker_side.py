"""The worker's side of a heartbeat region: beats, phases and reports, and the step at which it is to stop."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from resilient import clock
from resilient.heartbeat import layout
from resilient.heartbeat.layout import NO_TARGET, NOT_BEATEN, PHASES, TOLD
from resilient.heartbeat.region import Mapped, fence

_DATA = PHASES.index("data")


class WorkerRegion(Mapped):
    """The worker's side: beats, phases, reports; reads the stop target."""

    # How long a report waits for room before it is dropped and counted: the agent drains many times a second.
    full_wait_s = 2.0

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            super().__init__(fd)
        finally:
            os.close(fd)
        if self._words[layout.MAGIC_WORD] != layout.MAGIC:
            raise ValueError(f"{path} is not a heartbeat region of this version of resilient")
        self._words[layout.PID] = os.getpid()
        self._full_at = -1

    def beat(self, step: int) -> None:
        self._times[layout.BEAT_TIME] = now = clock.now()
        if self._words[layout.STEP] == NOT_BEATEN:
            self._times[layout.FIRST_TIME], self._words[layout.FIRST] = now, step
        self._words[layout.STEP] = step

    def begin_again(self) -> None:
        """Steps that were finished so far are none of those that will be counted."""
        self._words[layout.STEP] = NOT_BEATEN
        self.observe(False)

    @property
    def phase(self) -> int:
        """The present one: an index into PHASES, with TOLD where the script has told it."""
        return self._words[layout.PHASE]

    def enter(self, phase: int) -> int:
        """Switch to a phase (index into PHASES, with TOLD where the script says so); returns the one before."""
        before, now = self._words[layout.PHASE], clock.now()
        if before & ~TOLD == _DATA:
            self._times[layout.DATA_S] += now - self._times[layout.PHASE_TIME]
        self._times[layout.PHASE_TIME] = now
        self._words[layout.PHASE] = phase
        return before

    def touch(self) -> None:
        """Say that the worker is active, in the phase in which it is; not in phase `data`, whose time is counted."""
        if self._words[layout.PHASE] & ~TOLD != _DATA:
            self._times[layout.PHASE_TIME] = clock.now()

    def computed(self, seconds: float) -> None:
        """Say for how long the device has computed, beside what was said before."""
        self._times[layout.DEVICE_S] += seconds

    def reported(self, step: int) -> None:
        """Say up to which step lines of metrics tell, where lines follow beats; NOT_BEATEN where the script reports its own."""
        self._words[layout.REPORTED] = step

    def observe(self, observed: bool) -> None:
        """Say whether steps are counted from outside, and not told by the script's own beats."""
        self._words[layout.OBSERVED] = observed

    @property
    def data_s(self) -> float:
        """Seconds spent in phase `data`, without the present stay."""
        return self._times[layout.DATA_S]

    def stop_reason(self, boundary: int | None = None) -> str | None:
        """At a step boundary: the reason to stop here, or None. Holds while a proposal for this boundary is not yet settled.

        Args:
            boundary: its number, the same on all ranks; None: the step of the last beat.
        """
        position = self._words[layout.STEP] if boundary is None else boundary
        # Either this boundary is seen by the agent that has just proposed, or the proposal is seen here.
        self._words[layout.CHECKED] = position
        fence()
        while NO_TARGET != self._words[layout.TARGET] <= position:
            if self._words[layout.ARMED]:
                if self._words[layout.TARGET] > position:
                    break
                self._words[layout.STOPPED] = 1
                raw = self._map[layout.REASON_AT : layout.REASON_AT + layout.REASON_BYTES]
                return raw.split(b"\0", 1)[0].decode(errors="replace")
            time.sleep(0.001)
        return None

    def stop_is_due(self) -> bool:
        """Between two boundaries: whether the next one, that of the last beat, is where to stop. Passes no boundary."""
        return bool(self._words[layout.ARMED]) and NO_TARGET != self._words[layout.TARGET] <= self._words[layout.STEP]

    def report(self, event: str | None, fields: dict[str, object]) -> None:
        """Append a record; waits a moment when the ring is full, then drops it and counts the loss."""
        try:
            payload = json.dumps((clock.now(), event, fields)).encode()
        except (ValueError, TypeError, RecursionError):
            payload = json.dumps((clock.now(), event, _plain(fields))).encode()
        size = len(payload)
        head = self._words[layout.HEAD]
        if head + 4 + size - self._words[layout.TAIL] > self._ring_bytes and not self._wait_for_room(head + 4 + size):
            self._words[layout.DROPPED] += 1
            self._full_at = self._words[layout.TAIL]
            return
        self._write(head, size.to_bytes(4, "little"))
        self._write(head + 4, payload)
        fence()
        self._words[layout.HEAD] = head + 4 + size

    def _wait_for_room(self, end: int) -> bool:
        # Once it was in vain, waiting is not tried again before something has moved.
        deadline = time.monotonic() + (0.0 if self._full_at == self._words[layout.TAIL] else self.full_wait_s)
        while end - self._words[layout.TAIL] > self._ring_bytes:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _write(self, at: int, data: bytes) -> None:
        start = at % self._ring_bytes
        room = self._ring_bytes - start
        if len(data) <= room:
            self._ring[start : start + len(data)] = data
        else:
            self._ring[start:] = data[:room]
            self._ring[: len(data) - room] = data[room:]


def _plain(value: object) -> object:
    """A value of some library's own number type as Python's; anything else as text."""
    item = getattr(value, "item", None)
    if callable(item):
        value = item()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, int) and abs(value) >= 1 << 1000:
        return hex(value)  # Python writes no number with so many digits
    return value if isinstance(value, bool | int | float | None) else str(value)
