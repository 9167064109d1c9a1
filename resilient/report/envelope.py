"""A long curve in little memory: of each stretch of its axis, the lowest and the highest value.

Stretches are as wide as they must be for all to fit; when there are too many, each two neighbours become one. So neither the length
nor the extent of a curve has to be known before. Pure.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

STRETCHES = 600

Floats = npt.NDArray[np.float64]


class Stretch(NamedTuple):
    """The extremes of one stretch, each with its place; `group` is that of the last point."""

    low_x: float
    low: float
    high_x: float
    high: float
    group: int


@dataclass
class _Part:
    low_x: float
    low: float
    high_x: float
    high: float
    group: int

    def add(self, other: "_Part") -> None:
        """What comes after it in the same stretch."""
        if other.low < self.low:
            self.low_x, self.low = other.low_x, other.low
        if other.high > self.high:
            self.high_x, self.high = other.high_x, other.high
        self.group = max(self.group, other.group)


class Envelope:
    """Takes points, in any order and however many, and keeps the extremes.

    Args:
        width: of a stretch at the beginning, in units of the axis.
        most: stretches that are kept.
    """

    def __init__(self, width: float, most: int = STRETCHES) -> None:
        self._width = width
        self._most = most
        self._parts: dict[int, _Part] = {}

    def add(self, x: Floats, values: Floats, groups: npt.NDArray[np.int64]) -> None:
        """Take points: shape (n,) each; those that are not finite are left out. Args: groups: curves are broken between them."""
        good = np.isfinite(x) & np.isfinite(values)
        x, values, groups = x[good], values[good], groups[good]
        if not len(x):
            return
        self._widen(float(x.max() - x.min()))
        stretch = np.floor(x / self._width).astype(np.int64)
        order = np.lexsort((values, stretch))
        sorted_stretch = stretch[order]
        firsts = np.flatnonzero(np.r_[True, sorted_stretch[1:] != sorted_stretch[:-1]])
        lasts = np.r_[firsts[1:], len(order)] - 1
        newest = np.maximum.reduceat(groups[order], firsts)
        for at, low, high, group in zip(sorted_stretch[firsts], order[firsts], order[lasts], newest, strict=True):
            part = _Part(float(x[low]), float(values[low]), float(x[high]), float(values[high]), int(group))
            self._take(self._parts, int(at), part)
        while len(self._parts) > self._most:
            self._double()

    def _widen(self, span: float) -> None:
        """Before points that go so far: what they fill must not be many times what is kept."""
        while span / self._width > 16 * self._most and math.isfinite(2 * self._width):
            self._double()

    def _double(self) -> None:
        self._width *= 2
        merged: dict[int, _Part] = {}
        for at, part in sorted(self._parts.items()):
            self._take(merged, at // 2, part)
        self._parts = merged

    @staticmethod
    def _take(parts: dict[int, _Part], at: int, part: _Part) -> None:
        if (there := parts.get(at)) is not None:
            there.add(part)
        else:
            parts[at] = part

    def stretches(self) -> list[Stretch]:
        """In the order of the axis."""
        return [Stretch(each.low_x, each.low, each.high_x, each.high, each.group) for _, each in sorted(self._parts.items())]

    def points(self) -> list[tuple[int, float, float]]:
        """Group, place and value of the extremes, in the order of their places within each stretch."""
        found = []
        for each in self.stretches():
            ends = {(each.low_x, each.low), (each.high_x, each.high)}
            found += [(each.group, x, value) for x, value in sorted(ends)]
        return found
