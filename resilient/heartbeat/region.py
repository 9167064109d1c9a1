"""The heartbeat region: shared memory between one worker and its agent.

The worker (`worker_side`) beats and reports by plain stores, so that neither costs a system call, and the agent (`agent_side`)
reads what is there even of a worker that is stopped or dead. The memory is a file in RAM that the agent makes and removes; if the
agent is killed, the next one on the node salvages the records from it.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from checkpoint.typed import built
from resilient.heartbeat import layout
from resilient.heartbeat.layout import NOT_BEATEN, PHASES, TOLD

log = logging.getLogger(__name__)

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


def fence() -> None:
    """Order the stores before it against the loads after it: taking a lock is a full memory barrier."""
    with _lock:
        pass


class Mapped:
    """A region that is mapped, and what either side reads in it. Raises ValueError: it is too short for one."""

    def __init__(self, fd: int) -> None:
        self._damage_logged = False
        self._ring_bytes = os.fstat(fd).st_size - layout.HEADER_BYTES
        if self._ring_bytes < layout.LEAST_RING_BYTES:
            raise ValueError("too short for a heartbeat region")
        self._map = mmap.mmap(fd, layout.HEADER_BYTES + self._ring_bytes)
        self._whole = memoryview(self._map)
        self._words = self._whole[: layout.HEADER_BYTES].cast("q")
        self._times = self._whole[: layout.HEADER_BYTES].cast("d")
        self._ring = self._whole[layout.HEADER_BYTES :]

    def activity(self) -> Activity:
        """What the words say now."""
        words, times = self._words, self._times
        phase = words[layout.PHASE]  # read once: its source is in it
        code = phase & ~TOLD
        return Activity(
            pid=words[layout.PID],
            step=words[layout.STEP],
            checked=words[layout.CHECKED],
            phase=PHASES[code] if 0 <= code < len(PHASES) else PHASES[0],
            stopped=bool(words[layout.STOPPED]),
            dropped=words[layout.DROPPED],
            beat_t=_time(times[layout.BEAT_TIME]),
            phase_t=_time(times[layout.PHASE_TIME]),
            data_s=_time(times[layout.DATA_S]),
            device_s=_time(times[layout.DEVICE_S]),
            observed=bool(words[layout.OBSERVED]),
            first_step=words[layout.FIRST],
            first_beat_t=_time(times[layout.FIRST_TIME]),
            inferred=not phase & TOLD,
        )

    def left(self) -> list[Record]:
        """The records that were not kept, and the steps that were not reported."""
        if self._words[layout.MAGIC_WORD] != layout.MAGIC:
            raise ValueError("not a heartbeat region of this version of resilient")
        return self._records(self._words[layout.TAIL]) + self.unreported()

    def unreported(self) -> list[Record]:
        """Of a worker that has ended: a line of metrics for the steps that it has finished since its last one, if there are any.

        Lines of short steps wait for each other, see `resilient.script.progress`. Whoever dies meanwhile has finished those steps,
        and the next generation may go on behind them.
        """
        reported, step = self._words[layout.REPORTED], self._words[layout.STEP]
        if reported == NOT_BEATEN or step <= reported:
            return []
        fields = {"step": step, "step_s": None, "steps_per_s": None, **({"steps": step - reported} if step > reported + 1 else {})}
        return [Record(_time(self._times[layout.BEAT_TIME]), None, fields, self._words[layout.HEAD])]

    def _records(self, start: int) -> list[Record]:
        """The complete records from this place of the ring on; of a ring that its worker has written over, those before that."""
        head, at = self._words[layout.HEAD], start
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


@contextmanager
def _opened(path: Path) -> Iterator[Mapped]:
    """A region for a look. Raises OSError: it is not there; ValueError: it is no region."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        region = Mapped(fd)
    finally:
        os.close(fd)
    try:
        yield region
    finally:
        region.close()


def salvage(path: Path) -> list[Record]:
    """The records that were not kept, of a region whose agent and worker are dead. Raises ValueError if it is no region."""
    with _opened(path) as region:
        return region.left()


def peek(path: Path) -> Activity:
    """What a region says now. Raises OSError if it is not there, ValueError if it is no region."""
    with _opened(path) as region:
        return region.activity()


def _time(seconds: float) -> float:
    """What a worker has written as a time, 0 where it is none."""
    return seconds if math.isfinite(seconds) and 0.0 <= seconds <= _LATEST_T else 0.0
