"""Events of every step, of which the ledger has one line a minute once there have been many of them. Pure.

A snapshot in memory and its replica are told at every step, for months. The first `ONE_BY_ONE` lines of a generation stand for one
each. Of what follows, only the newest `NEWEST` of the last minute are kept apart, until another event is written: it may be a
fault, and the lines before it tell what a run can go on from. All older ones become one line a minute for each event and tier: that
of the last one, with `count`, the `first_step`, and the sums of what they measured.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

Entry = dict[str, object]

EVERY_STEP = ("snapshot", "replicated")
SUMS = ("bytes", "stall_s", "write_s")
ONE_BY_ONE = 1000
NEWEST = 32
EVERY_S = 60.0


@dataclass
class _Group:
    """Of one event and tier, at least one."""

    first: Entry
    last: Entry
    count: int = 0
    longest_stall_s: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.last = entry
        self.count += 1
        for name in SUMS:
            if name in entry:
                self.sums[name] = self.sums.get(name, 0) + _number(entry, name)
        self.longest_stall_s = max(self.longest_stall_s, _number(entry, "stall_s"))

    @property
    def line(self) -> Entry:
        if self.count == 1:
            return self.last
        line = {**self.last, "count": self.count, "first_step": self.first["step"]}
        line |= {name: round(value, 6) for name, value in self.sums.items()}
        return line | ({"longest_stall_s": self.longest_stall_s} if "stall_s" in self.sums else {})


class Summaries:
    """Between the events of one driver and its ledger. Lines come out in the order of their times, as they went in."""

    def __init__(self) -> None:
        self._single = 0  # lines of this generation that were written one by one
        self._newest: deque[Entry] = deque()
        self._groups: dict[tuple[object, object], _Group] = {}

    def take(self, entry: Entry) -> list[Entry]:
        """The next event, as `ledger.event_entry` makes it; returns what is to be written now."""
        if entry["event"] not in EVERY_STEP:
            if entry["event"] == "generation_started":
                self._single = 0
            return [*self._all(), entry]
        if self._single < ONE_BY_ONE:
            self._single += 1
            return [entry]
        self._newest.append(entry)
        until_t = _number(entry, "t") - EVERY_S
        while len(self._newest) > NEWEST or _number(self._newest[0], "t") <= until_t:
            oldest = self._newest.popleft()
            self._groups.setdefault((oldest["event"], oldest.get("tier")), _Group(oldest, oldest)).add(oldest)
        until_t = _number(self._newest[0], "t") - EVERY_S
        if any(_number(group.first, "t") <= until_t for group in self._groups.values()):
            return self._summed()
        return []

    def _summed(self) -> list[Entry]:
        lines = sorted((group.line for group in self._groups.values()), key=lambda line: _number(line, "t"))
        self._groups.clear()
        return lines

    def _all(self) -> list[Entry]:
        lines = [*self._summed(), *self._newest]
        self._newest.clear()
        return lines


def _number(entry: Mapping[str, object], name: str) -> float:
    value = entry.get(name)
    return value if isinstance(value, int | float) else 0.0
