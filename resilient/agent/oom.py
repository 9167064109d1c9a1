"""The kernel's OOM killer: whether it ended a worker, and by which limit.

Asked of two witnesses. The kernel log names the process that was killed, where it may be read. The cgroup of a worker counts
kills; its count is read every second while workers run, so that a rise belongs to a worker that was killed at that time, and not to
something that happened long ago. Owns the reading of both; cgroup v1 and v2.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from resilient.recovery.faults import OutOfMemory

POLL_S = 1.0
KERNEL_LOG = Path("/dev/kmsg")
REACHED = 0.95  # of its limit is what a cgroup has used whose limit it was
_RECORD_BYTES = 8192
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # only there are the process ids of the kernel log ours
_UNLIMITED = 1 << 60  # v1 writes no limit as a very large one
_KILLED = re.compile(r"Killed process (\d+) ")
_LIMITED = re.compile(r"oom-kill:constraint=CONSTRAINT_MEMCG,.*\boom_memcg=([^,]+),.*\bpid=(\d+)")


@dataclass(frozen=True)
class Controller:
    """Where the memory cgroups are seen: the mount point, the cgroup that is mounted there, and whether it is cgroup v2."""

    mount: Path
    root: str
    unified: bool

    def directory(self, cgroup: str) -> Path:
        """Of a cgroup by its path in /proc/PID/cgroup."""
        inside = cgroup.removeprefix(self.root) if self.root != "/" else cgroup
        return self.mount / inside.strip("/")


def controller(mountinfo: str) -> Controller | None:
    """From /proc/self/mountinfo: who accounts for memory. v1 does where it has that controller."""
    unified = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if not after:
            continue
        fields, (kind, _, options) = before.split(" "), after.split(" ")[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            return Controller(Path(fields[4]), fields[3], unified=False)
        if kind == "cgroup2":
            unified = Controller(Path(fields[4]), fields[3], unified=True)
    return unified


def cgroup_of(text: str, *, unified: bool) -> str | None:
    """From /proc/PID/cgroup: the path of the cgroup that accounts for the memory."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if (unified and number == "0" and not controllers) or (not unified and "memory" in controllers.split(",")):
            return path
    return None


def kills(directory: Path, *, unified: bool) -> int | None:
    """How many processes of a cgroup the OOM killer has ended; None where nobody counts."""
    try:
        text = (directory / ("memory.events" if unified else "memory.oom_control")).read_text()
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found is not None else None


def tightest(directory: Path, mount: Path, *, unified: bool) -> tuple[Path, int, int | None] | None:
    """Of a cgroup and those around it, the one with the lowest limit: where, the limit and the most that was used, in bytes."""
    limits = []
    for each in (directory, *directory.parents):
        limit = _number(each / ("memory.max" if unified else "memory.limit_in_bytes"))
        if limit is not None and limit < _UNLIMITED:
            limits.append((limit, each))
        if each == mount:
            break
    if not limits:
        return None
    limit, where = min(limits, key=lambda found: found[0])
    names = ("memory.peak", "memory.current") if unified else ("memory.max_usage_in_bytes", "memory.usage_in_bytes")
    used = next((number for name in names if (number := _number(where / name)) is not None), None)
    return where, limit, used


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a limit may be the word max
        return None


def killed(records: Iterable[str]) -> Iterator[tuple[int, str]]:
    """From records of the kernel log: process ids that the OOM killer ended, each with the words."""
    for record in records:
        text = record.partition(";")[2].partition("\n")[0]
        found = _KILLED.search(text) if "ut of memory" in text else None
        if found is not None:
            yield int(found[1]), text


def limited(records: Iterable[str]) -> Iterator[tuple[int, str]]:
    """From records of the kernel log: process ids that the OOM killer chose, each with the cgroup whose limit was met."""
    for record in records:
        found = _LIMITED.search(record.partition(";")[2].partition("\n")[0])
        if found is not None:
            yield int(found[2]), found[1]


class KernelLog:
    """What is written to the kernel log from now on; nothing where it may not be read.

    Args:
        for_processes: nothing either where its process ids are not ours.
    """

    def __init__(self, path: Path = KERNEL_LOG, *, for_processes: bool = True) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            initial = os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE  # noqa: PTH115 - it is no path
            if initial or not for_processes:
                self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> Iterator[str]:
        """The records that are new."""
        while self._fd is not None:
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except BrokenPipeError:  # some were overwritten; the next read goes on behind them
                continue
            except OSError:
                return
            if not record:
                return
            yield record.decode(errors="replace")

    def texts(self) -> Iterator[str]:
        """The same without what the kernel writes before and behind the text."""
        for record in self.read():
            yield record.partition(";")[2].partition("\n")[0]

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass
class OomWatch:
    """Watches the cgroups of a node's workers, by process id."""

    _controller: Controller | None = None
    _log: KernelLog = field(default_factory=KernelLog)
    _cgroups: dict[int, str] = field(default_factory=dict)
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # at the last two polls: the kill may be older than its news
    _named: dict[int, str] = field(default_factory=dict)
    _limits: dict[int, str] = field(default_factory=dict)
    _polled_t: float = 0.0

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):
            self._controller = controller(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))

    def poll(self, pids: Iterable[int]) -> None:
        """These workers run; to be called often, which costs something once in a while only."""
        now = time.monotonic()
        if self._controller is None or now - self._polled_t < POLL_S:
            return
        self._polled_t = now
        for pid in pids:
            with contextlib.suppress(OSError):
                cgroup = cgroup_of(Path(f"/proc/{pid}/cgroup").read_text(errors="replace"), unified=self._controller.unified)
                if cgroup is not None:
                    self._cgroups[pid] = cgroup
        for cgroup in set(self._cgroups.values()):
            count = self._count(cgroup)
            if count is not None:
                self._counts[cgroup] = (self._counts.get(cgroup, (count, count))[1], count)

    def _count(self, cgroup: str) -> int | None:
        assert self._controller is not None
        return kills(self._controller.directory(cgroup), unified=self._controller.unified)

    def ended(self, pid: int) -> OutOfMemory | None:
        """Whether this worker, which was ended by a SIGKILL a moment ago, was ended for want of memory."""
        records = list(self._log.read())
        self._named.update(killed(records))
        self._limits.update(limited(records))
        cgroup = self._cgroups.pop(pid, None)
        line = self._named.pop(pid, None)
        rose = cgroup is not None and self._rose(cgroup)
        if line is None and not rose:
            return None
        cgroup = self._limits.pop(pid, cgroup)  # the kernel knows better, where the worker was moved since the last poll
        found = None
        if cgroup is not None and self._controller is not None:
            directory = self._controller.directory(cgroup)
            found = tightest(directory, self._controller.mount, unified=self._controller.unified)
        if found is not None and found[2] is not None and found[2] < REACHED * found[1]:
            found = None  # the limit was not reached: the machine had nothing left
        evidence = f"kernel log: {line}" if line is not None else f"cgroup {cgroup} counts one oom_kill more than a moment before"
        if found is None or self._controller is None:
            return OutOfMemory(None, None, None, evidence)
        where, limit, used = found
        name = "/" + str(where.relative_to(self._controller.mount)) if where != self._controller.mount else "/"
        return OutOfMemory(name, limit, used, evidence)

    def _rose(self, cgroup: str) -> bool:
        """Whether the count of a cgroup is higher than a moment ago; each kill is one worker's."""
        now, counts = self._count(cgroup), self._counts.get(cgroup)
        if now is None or counts is None or now <= counts[0]:
            return False
        self._counts[cgroup] = (counts[0] + 1, max(counts[0] + 1, counts[1]))
        return True

    def close(self) -> None:
        """Once."""
        self._log.close()
