"""Parts of SVG charts over time: scales, round ticks, curves that stay small. Pure; shared by all drawings of a campaign.

Elements carry CSS classes (`grid`, `tick`, `name`, `curve`); the page or the drawing that they stand in owns the colours.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

Line = Mapping[str, Any]
Point = tuple[float, float]

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
FAR = 1e6  # widths of a drawing: what is further outside is not seen either
LARGE = 1e300  # half as much again can still be told
POINTS = 1500  # of a curve at most
DAY_S = 86400.0
STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 4 * 3600, 6 * 3600, 12 * 3600, DAY_S)


class Scale(NamedTuple):
    """From values to places; low is where `low` is drawn."""

    low: float
    high: float
    at_low: float
    at_high: float

    def __call__(self, value: float) -> float:
        share = (value / 2 - self.low / 2) / ((self.high / 2 - self.low / 2) or 0.5)  # halves: the whole may be beyond a double
        if not math.isfinite(share):  # of numbers at the ends of what a double holds
            return self.at_low
        share = max(-FAR, min(FAR, share))
        return self.at_low + share * (self.at_high - self.at_low)


def panel(
    name: str,
    points: Sequence[tuple[int, float, float]],
    x: Scale,
    top: float,
    height: float,
    *,
    from_zero: bool,
) -> Iterator[str]:
    """One curve over time with its axis, broken between generations.

    Args:
        points: generation, place on the axis, value.
        top: where its upper edge is drawn.
    """
    y = value_scale([got for _, _, got in points], top, height, from_zero=from_zero)
    for tick in ticks(y.low, y.high, 4):
        yield f'<line class="grid" x1="{x.at_low:.0f}" x2="{x.at_high:.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text class="tick" x="{x.at_low - 6:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>'
    yield f'<text class="name" x="{x.at_low:.0f}" y="{top - 6:.1f}">{safe(name)}</text>'
    yield from curves(points, x, y)


def of_lines(metrics: Iterable[Line], value: Callable[[Line], object]) -> list[tuple[int, float, float]]:
    """Generation, time and value of lines of metrics; a value that is no finite number leaves a gap."""
    return [(line["generation"], line["t"], got) for line in metrics if (got := finite(value(line))) is not None]


def value_scale(values: Sequence[float], top: float, height: float, *, from_zero: bool) -> Scale:
    """From values to heights, with round ends as far as those are near."""
    low, high = (0.0 if from_zero else min(values, default=0.0)), max(values, default=1.0)
    if low == high and abs(low) < LARGE:  # a curve that is level lies in the middle
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(low) or 1.0) / 2
    steps = ticks(low, high, 4)
    return Scale(min(low, *steps), max(high, *steps), top + height, top)


def curves(points: Sequence[tuple[int, float, float]], x: Scale, y: Scale) -> Iterator[str]:
    """A polyline for each generation of (generation, time, value); all together of POINTS at most, and two more for each."""
    by_generation: dict[int, list[Point]] = {}
    for generation, t, got in points:
        by_generation.setdefault(generation, []).append((t, got))
    for generation in sorted(by_generation):
        own = by_generation[generation]
        curve = thinned(own, max(2, POINTS * len(own) // len(points)))
        drawn = " ".join(f"{x(t):.1f},{y(got):.1f}" for t, got in curve)
        if len(curve) == 1:
            drawn += f" {x(curve[0][0]) + 1:.1f},{y(curve[0][1]):.1f}"
        yield f'<polyline class="curve" points="{drawn}"/>'


def safe(text: str) -> str:
    """A text as XML may hold it: a message of a worker may have bytes of any kind."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def finite(value: object) -> float | None:
    """The number that it is, if it is one that can be drawn."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def integer(value: object) -> int:
    """The whole number that it is, or else 0."""
    return value if isinstance(value, int) else 0


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many points that keep the extremes: of each stretch, the lowest and the highest."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, both included where they are round; `low` alone where none can be told apart."""
    span = (high - low) or abs(high) or 1.0
    if not math.isfinite(span):
        return [2 * each for each in ticks(low / 2, high / 2, about) if math.isfinite(2 * each)]
    power = 10.0 ** math.floor(math.log10(span / about)) if span / about else 0.0
    if not power:
        return [low]
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda each: abs(span / each - about))
    first = math.ceil(low / step - 1e-9)
    found = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
    return [each for each in found if math.isfinite(each)] or [low]


def number(value: float) -> str:
    """As an axis names it."""
    if abs(value) >= 10_000:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1000:g}k"
    return f"{value:.10g}" if abs(value) >= 1e-6 else "0"


def seconds_axis(x: Scale, y: float) -> Iterator[str]:
    """Times since the beginning of the scale, which is in seconds."""
    span_s = x.high - x.low
    step_s = next((each for each in STEPS_S if span_s <= 12 * each), math.ceil(span_s / 12 / DAY_S) * DAY_S)
    for count in range(math.floor(span_s / step_s + 1e-9) + 1):
        place = x(x.low + count * step_s)
        yield f'<text class="tick" x="{place:.1f}" y="{y:.0f}" text-anchor="middle">{_clock(count * step_s, step_s)}</text>'


def _clock(t_s: float, step_s: float) -> str:
    if step_s < 10:
        return f"{t_s:g} s"
    minutes, seconds = divmod(round(t_s), 60)
    if step_s < 600:
        return f"{minutes}:{seconds:02}"
    return f"{minutes // 60}:{minutes % 60:02} h" if step_s < DAY_S else f"{minutes // 1440} d"
