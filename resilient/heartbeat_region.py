"""The heartbeat region: shared memory between one worker and its agent.

Owns the layout of the words and of the ring of records. The worker beats and reports by plain stores, so that neither costs a
system call, and the agent reads what is there even of a worker that is stopped or dead. The memory is a file in RAM that the agent
makes and removes; if the agent is killed, the next one on the node salvages the records from it.

One side writes each word, and a store of eight aligned bytes is atomic. A record counts only once the head has moved past it,
so a worker killed in mid-report leaves no half. All pages are there from the beginning: a worker that stores into one for which
there is no room would die of SIGBUS.
"""

import json
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from checkpoint.errors import naming
from checkpoint.typed import built
from resilient import clock

log = logging.getLogger(__name__)

# The event under which an exception travels from the worker to its agent; it is never written to the ledger.
RAISED = "raised"

PHASES = ("start", "load", "data", "step", "snapshot", "eval")
TOLD = 1 << 8  # beside the index of a phase that the script has told by itself; without it, the runtime has inferred it

_DATA = PHASES.index("data")

NOT_BEATEN = -1  # position before the first finished step
NOT_CHECKED = -2  # no step boundary reached yet
NO_TARGET = -3

_MAGIC = 0x52455349_00000005
_HEADER_BYTES = 4096
RING_BYTES = 8 << 20  # a driver may be away for minutes, and steps be short
LEAST_RING_BYTES = 64 << 10
_SHARE = 64  # a ring takes at most such a part of the room that there is, as in a container's /dev/shm of 64 MiB
_REASON_AT, _REASON_BYTES = 2048, 128

# Words of eight bytes; the comment says who writes.
_MAGIC_WORD, _PID, _STEP, _CHECKED, _PHASE, _STOPPED, _HEAD, _DROPPED, _OBSERVED, _FIRST, _REPORTED = range(
    11
)  # worker, but for the magic number
_TARGET, _ARMED, _TAIL = 16, 17, 18  # agent
_BEAT_TIME, _PHASE_TIME = 32, 33  # worker; doubles, unix seconds
_DATA_S, _FIRST_TIME, _DEVICE_S = 34, 35, 36  # worker; doubles: seconds, unix seconds, seconds

Fields = Mapping[str, object]

_LATEST_T = 1e11  # unix seconds: what is beyond is no time
_Payload = tuple[float, str | None, dict[str, Any]]  # as JSON: of Python's own, which has every number that Python has


@dataclass(frozen=True)
class Record:
    """What a worker reported: a ledger event, or with `event` None a line of metrics. `t` in unix seconds.

    `end` is the place in the ring up to which `AgentRegion.keep` gives room free.
    """

    t: float
    event: str | None
    fields: Fields
    end: int


@dataclass(frozen=True)
class Activity:
    """What the region says of a worker at one moment; times in unix seconds, 0 for never.

    `data_s`: seconds in phase `data`. `device_s`: seconds for which its GPU has computed; 0 where it tells of none. `observed`: its
    script says nothing, and `resilient.script.progress` beats for it. `first_step`: the first that it has finished, at
    `first_beat_t`. `inferred`: its script has not told the phase that it is in.
    """

    pid: int
    step: int
    checked: int
    phase: str
    stopped: bool
    dropped: int
    beat_t: float
    phase_t: float
    data_s: float = 0.0
    device_s: float = 0.0
    observed: bool = False
    first_step: int = NOT_BEATEN
    first_beat_t: float = 0.0
    inferred: bool = False


_lock = threading.Lock()


def _fence() -> None:
    """Order the stores before it against the loads after it: taking a lock is a full memory barrier."""
    with _lock:
        pass


class _Mapped:
    def __init__(self, fd: int) -> None:
        self._damage_logged = False
        self._ring_bytes = os.fstat(fd).st_size - _HEADER_BYTES
        if self._ring_bytes < LEAST_RING_BYTES:
            raise ValueError("too short for a heartbeat region")
        self._map = mmap.mmap(fd, _HEADER_BYTES + self._ring_bytes)
        self._whole = memoryview(self._map)
        self._words = self._whole[:_HEADER_BYTES].cast("q")
        self._times = self._whole[:_HEADER_BYTES].cast("d")
        self._ring = self._whole[_HEADER_BYTES:]

    def activity(self) -> Activity:
        """What the words say now."""
        words, times = self._words, self._times
        phase = words[_PHASE]  # read once: its source is in it
        code = phase & ~TOLD
        return Activity(
            pid=words[_PID],
            step=words[_STEP],
            checked=words[_CHECKED],
            phase=PHASES[code] if 0 <= code < len(PHASES) else PHASES[0],
            stopped=bool(words[_STOPPED]),
            dropped=words[_DROPPED],
            beat_t=_time(times[_BEAT_TIME]),
            phase_t=_time(times[_PHASE_TIME]),
            data_s=_time(times[_DATA_S]),
            device_s=_time(times[_DEVICE_S]),
            observed=bool(words[_OBSERVED]),
            first_step=words[_FIRST],
            first_beat_t=_time(times[_FIRST_TIME]),
            inferred=not phase & TOLD,
        )

    def left(self) -> list[Record]:
        """The records that were not kept, and the steps that were not reported."""
        if self._words[_MAGIC_WORD] != _MAGIC:
            raise ValueError("not a heartbeat region of this version of resilient")
        return self._records(self._words[_TAIL]) + self.unreported()

    def unreported(self) -> list[Record]:
        """Of a worker that has ended: a line of metrics for the steps that it has finished since its last one, if there are any.

        Lines of short steps wait for each other, see `resilient.script.progress`. Whoever dies meanwhile has finished those steps,
        and the next generation may go on behind them.
        """
        reported, step = self._words[_REPORTED], self._words[_STEP]
        if reported == NOT_BEATEN or step <= reported:
            return []
        fields = {"step": step, "step_s": None, "steps_per_s": None, **({"steps": step - reported} if step > reported + 1 else {})}
        return [Record(_time(self._times[_BEAT_TIME]), None, fields, self._words[_HEAD])]

    def _records(self, start: int) -> list[Record]:
        """The complete records from this place of the ring on; of a ring that its worker has written over, those before that."""
        head, at = self._words[_HEAD], start
        records: list[Record] = []
        if not 0 <= start <= head <= start + self._ring_bytes:
            return self._damaged(records)
        while at < head:
            size = int.from_bytes(self._read(at, 4), "little")
            if at + 4 + size > head:
                return self._damaged(records)
            try:
                t, event, fields = msgspec.convert(json.loads(self._read(at + 4, size)), built(_Payload))
            except (ValueError, RecursionError):
                return self._damaged(records)
            at += 4 + size
            records.append(Record(_time(t), event, fields, at))
        return records

    def _damaged(self, records: list[Record]) -> list[Record]:
        if not self._damage_logged:
            log.error("a heartbeat region was written over: what its worker reports from now on is lost")
            self._damage_logged = True
        return records

    def _read(self, at: int, size: int) -> bytes:
        start = at % self._ring_bytes
        first = bytes(self._ring[start : start + size])
        return first if len(first) == size else first + bytes(self._ring[: size - len(first)])

    def close(self) -> None:
        self._words.release()
        self._times.release()
        self._ring.release()
        self._whole.release()
        self._map.close()


def salvage(path: Path) -> list[Record]:
    """The records that were not kept, of a region whose agent and worker are dead. Raises ValueError if it is no region."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        region = _Mapped(fd)
    finally:
        os.close(fd)
    try:
        return region.left()
    finally:
        region.close()


def peek(path: Path) -> Activity:
    """What a region says now. Raises OSError if it is not there, ValueError if it is no region."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        region = _Mapped(fd)
    finally:
        os.close(fd)
    try:
        return region.activity()
    finally:
        region.close()


def ring_bytes(free_bytes: int) -> int:
    """Of a region that is made where so much is free. Pure."""
    return max(LEAST_RING_BYTES, min(RING_BYTES, free_bytes // _SHARE // mmap.PAGESIZE * mmap.PAGESIZE))


class AgentRegion(_Mapped):
    """The agent's side: makes the memory, reads the activity and the records, writes the stop target.

    Raises OSError where there is no room for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstatvfs(fd)
            with naming(path):
                os.posix_fallocate(fd, 0, _HEADER_BYTES + ring_bytes(found.f_bavail * found.f_frsize))
            super().__init__(fd)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self._read_to = 0
        self._closed = False
        self._words[_MAGIC_WORD] = _MAGIC
        self._words[_STEP] = self._words[_FIRST] = self._words[_REPORTED] = NOT_BEATEN
        self._words[_CHECKED] = NOT_CHECKED
        self._words[_TARGET] = NO_TARGET

    def propose(self, target: int, reason: str) -> int:
        """Ask the worker to hold at the first boundary at or beyond `target`; returns the last boundary it has checked."""
        text = reason.encode()[: _REASON_BYTES - 1]
        self._map[_REASON_AT : _REASON_AT + _REASON_BYTES] = text.ljust(_REASON_BYTES, b"\0")
        self._words[_TARGET] = target
        _fence()
        return self._words[_CHECKED]

    def arm(self, target: int) -> None:
        """Turn the proposal into an order: stop at the first boundary at or beyond `target`."""
        self._words[_TARGET] = target
        _fence()
        self._words[_ARMED] = 1

    def drain(self) -> list[Record]:
        """The records that are complete and were not read before, oldest first. Their room is given free by `keep`."""
        records = self._records(self._read_to)
        if records:
            self._read_to = records[-1].end
        return records

    def keep(self, end: int) -> None:
        """The records up to this place are in the ledger: nobody needs to find them here any more."""
        if not self._closed:
            self._words[_TAIL] = max(end, self._words[_TAIL])

    def close(self, *, keep_file: bool = False) -> None:
        """Give the memory back; the file is left for `salvage` where that is wanted."""
        self._closed = True
        super().close()
        if not keep_file:
            self.path.unlink(missing_ok=True)


class WorkerRegion(_Mapped):
    """The worker's side: beats, phases, reports; reads the stop target."""

    # How long a report waits for room before it is dropped and counted: the agent drains many times a second.
    full_wait_s = 2.0

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            super().__init__(fd)
        finally:
            os.close(fd)
        if self._words[_MAGIC_WORD] != _MAGIC:
            raise ValueError(f"{path} is not a heartbeat region of this version of resilient")
        self._words[_PID] = os.getpid()
        self._full_at = -1

    def beat(self, step: int) -> None:
        self._times[_BEAT_TIME] = now = clock.now()
        if self._words[_STEP] == NOT_BEATEN:
            self._times[_FIRST_TIME], self._words[_FIRST] = now, step
        self._words[_STEP] = step

    def begin_again(self) -> None:
        """Steps that were finished so far are none of those that will be counted."""
        self._words[_STEP] = NOT_BEATEN
        self.observe(False)

    @property
    def phase(self) -> int:
        """The present one: an index into PHASES, with TOLD where the script has told it."""
        return self._words[_PHASE]

    def enter(self, phase: int) -> int:
        """Switch to a phase (index into PHASES, with TOLD where the script says so); returns the one before."""
        before, now = self._words[_PHASE], clock.now()
        if before & ~TOLD == _DATA:
            self._times[_DATA_S] += now - self._times[_PHASE_TIME]
        self._times[_PHASE_TIME] = now
        self._words[_PHASE] = phase
        return before

    def touch(self) -> None:
        """Say that the worker is active, in the phase in which it is; not in phase `data`, whose time is counted."""
        if self._words[_PHASE] & ~TOLD != _DATA:
            self._times[_PHASE_TIME] = clock.now()

    def computed(self, seconds: float) -> None:
        """Say for how long the device has computed, beside what was said before."""
        self._times[_DEVICE_S] += seconds

    def reported(self, step: int) -> None:
        """Say up to which step lines of metrics tell, where lines follow beats; NOT_BEATEN where the script reports its own."""
        self._words[_REPORTED] = step

    def observe(self, observed: bool) -> None:
        """Say whether steps are counted from outside, and not told by the script's own beats."""
        self._words[_OBSERVED] = observed

    @property
    def data_s(self) -> float:
        """Seconds spent in phase `data`, without the present stay."""
        return self._times[_DATA_S]

    def stop_reason(self, boundary: int | None = None) -> str | None:
        """At a step boundary: the reason to stop here, or None. Holds while a proposal for this boundary is not yet settled.

        Args:
            boundary: its number, the same on all ranks; None: the step of the last beat.
        """
        position = self._words[_STEP] if boundary is None else boundary
        # Either this boundary is seen by the agent that has just proposed, or the proposal is seen here.
        self._words[_CHECKED] = position
        _fence()
        while NO_TARGET != self._words[_TARGET] <= position:
            if self._words[_ARMED]:
                if self._words[_TARGET] > position:
                    break
                self._words[_STOPPED] = 1
                raw = self._map[_REASON_AT : _REASON_AT + _REASON_BYTES]
                return raw.split(b"\0", 1)[0].decode(errors="replace")
            time.sleep(0.001)
        return None

    def stop_is_due(self) -> bool:
        """Between two boundaries: whether the next one, that of the last beat, is where to stop. Passes no boundary."""
        return bool(self._words[_ARMED]) and NO_TARGET != self._words[_TARGET] <= self._words[_STEP]

    def report(self, event: str | None, fields: dict[str, object]) -> None:
        """Append a record; waits a moment when the ring is full, then drops it and counts the loss."""
        try:
            payload = json.dumps((clock.now(), event, fields)).encode()
        except (ValueError, TypeError, RecursionError):
            payload = json.dumps((clock.now(), event, _plain(fields))).encode()
        size = len(payload)
        head = self._words[_HEAD]
        if head + 4 + size - self._words[_TAIL] > self._ring_bytes and not self._wait_for_room(head + 4 + size):
            self._words[_DROPPED] += 1
            self._full_at = self._words[_TAIL]
            return
        self._write(head, size.to_bytes(4, "little"))
        self._write(head + 4, payload)
        _fence()
        self._words[_HEAD] = head + 4 + size

    def _wait_for_room(self, end: int) -> bool:
        # Once it was in vain, waiting is not tried again before something has moved.
        deadline = time.monotonic() + (0.0 if self._full_at == self._words[_TAIL] else self.full_wait_s)
        while end - self._words[_TAIL] > self._ring_bytes:
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


def _time(seconds: float) -> float:
    """What a worker has written as a time, 0 where it is none."""
    return seconds if math.isfinite(seconds) and 0.0 <= seconds <= _LATEST_T else 0.0
