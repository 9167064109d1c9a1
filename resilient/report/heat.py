"""When which node was in trouble: counts by host and stretch of time, in little memory. Pure."""

from collections import Counter

COLUMNS = 96
WIDTH_S = 1.0  # of a stretch at the beginning


class Heat:
    """Takes what happened to hosts, and keeps counts by kind; stretches are doubled when there are too many.

    Attributes:
        width_s: of a stretch.
    """

    def __init__(self, columns: int = COLUMNS) -> None:
        self.width_s = WIDTH_S
        self._columns = columns
        self._cells: dict[tuple[str, int], Counter[str]] = {}
        self._low: int | None = None
        self._high = 0

    def add(self, host: str, t: float, kind: str) -> None:
        """Args: t: unix seconds."""
        at = int(t // self.width_s)
        self._low = at if self._low is None else min(self._low, at)
        self._high = max(self._high, at)
        self._cells.setdefault((host, at), Counter())[kind] += 1
        while self._high - self._low >= self._columns:
            self._double()

    def _double(self) -> None:
        assert self._low is not None
        self.width_s *= 2
        merged: dict[tuple[str, int], Counter[str]] = {}
        for (host, at), counts in self._cells.items():
            merged.setdefault((host, at // 2), Counter()).update(counts)
        self._cells, self._low, self._high = merged, self._low // 2, self._high // 2

    def rows(self) -> dict[str, dict[float, Counter[str]]]:
        """Counts by host and the beginning of the stretch, unix seconds; hosts with the most first."""
        found: dict[str, dict[float, Counter[str]]] = {}
        for (host, at), counts in sorted(self._cells.items()):
            found.setdefault(host, {})[at * self.width_s] = counts
        return dict(sorted(found.items(), key=lambda item: -sum(counts.total() for counts in item[1].values())))
