"""The time line of an experiment as an SVG drawing: loss and throughput, with what was injected and what was done about it.

Pure. Colours are CSS classes of the page that it stands in; each mark has a title, which browsers show under the pointer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from chaos.judging.matching import Line
from chaos.judging.observation import Observation

WIDTH, LEFT, RIGHT = 1000.0, 64.0, 12.0
MARKS, PANEL, GAP, AXIS = 44.0, 150.0, 26.0, 26.0  # heights: strip of marks, of a panel, between panels, of the axis
HEIGHT = MARKS + 2 * PANEL + GAP + AXIS
POINTS = 1500  # of a curve at most

Point = tuple[float, float]


class _Scale(NamedTuple):
    """From values to places; low is where `low` is drawn."""

    low: float
    high: float
    at_low: float
    at_high: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.at_low + share * (self.at_high - self.at_low)


def svg(seen: Observation) -> str:
    """The drawing; a sentence where no step was computed."""
    if not seen.metrics:
        return "<p>No step was computed.</p>"
    began_t = _began_t(seen)
    ended_t = max([line["t"] for line in (*seen.events, *seen.metrics)])
    x = _Scale(began_t, ended_t, LEFT, WIDTH - RIGHT)
    top, under = MARKS, MARKS + PANEL + GAP
    parts = [
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="loss and throughput over time">',
        *_bands(seen, x),
        *_panel("loss", seen.metrics, lambda line: line.get("loss"), x, top, from_zero=False),
        *_panel(*_throughput(seen.metrics), x, under, from_zero=True),
        *_seconds(x),
        *_marks(seen, x),
        "</svg>",
    ]
    return "\n".join(parts)


def _began_t(seen: Observation) -> float:
    return float(min(line["t"] for line in (*seen.events, *seen.metrics)))


def _throughput(metrics: Sequence[Line]) -> tuple[str, Sequence[Line], Callable[[Line], object]]:
    if any(line.get("tokens_per_s") for line in metrics):
        return "tokens a second", metrics, lambda line: line.get("tokens_per_s")
    return "steps a second", metrics, lambda line: 1 / line["step_s"] if line.get("step_s") else None


# -- curves ------------------------------------------------------------------------------------------------------------


def _panel(
    name: str, metrics: Sequence[Line], value: Callable[[Line], object], x: _Scale, top: float, *, from_zero: bool
) -> Iterator[str]:
    """One curve, broken between generations, with its axis."""
    points = [(line["generation"], line["t"], got) for line in metrics if (got := _finite(value(line))) is not None]
    values = [got for _, _, got in points]
    low, high = (0.0 if from_zero else min(values, default=0.0)), max(values, default=1.0)
    steps = ticks(low, high, 4)
    y = _Scale(min(low, *steps), max(high, *steps), top + PANEL, top)
    for tick in steps:
        yield f'<line class="grid" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
    yield f'<text class="name" x="{LEFT:.0f}" y="{top - 6:.1f}">{escape(name)}</text>'
    for generation in sorted({number for number, _, _ in points}):
        curve = thinned([(t, got) for number, t, got in points if number == generation], POINTS)
        drawn = " ".join(f"{x(t):.1f},{y(got):.1f}" for t, got in curve)
        if len(curve) == 1:
            drawn += f" {x(curve[0][0]) + 1:.1f},{y(curve[0][1]):.1f}"
        yield f'<polyline class="curve" points="{drawn}"/>'


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


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
    """Round numbers from `low` to `high`, both included where they are round."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = min((power * factor for factor in (1, 2, 5, 10)), key=lambda each: abs(span / each - about))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def _number(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.10g}" if abs(value) >= 1e-6 else "0"


def _seconds(x: _Scale) -> Iterator[str]:
    for tick in ticks(0, x.high - x.low, 10):
        place = x(x.low + tick)
        yield f'<text class="tick" x="{place:.1f}" y="{HEIGHT - 8:.0f}" text-anchor="middle">{_clock(tick)}</text>'


def _clock(seconds: float) -> str:
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:.3g} min"


# -- bands and marks ---------------------------------------------------------------------------------------------------


def _bands(seen: Observation, x: _Scale) -> Iterator[str]:
    """A band for each generation, from its start to the next one's, every other one shaded."""
    starts = [line for line in seen.events if line["event"] == "generation_started"]
    ends = [*(line["t"] for line in starts[1:]), x.high]
    for number, (line, end) in enumerate(zip(starts, ends, strict=False)):
        left, right = x(line["t"]), x(max(end, line["t"]))
        told = f"generation {line['generation']}: {line['world_size']} ranks, from step {line['resumed_step'] or 0}"
        yield (
            f'<rect class="band{number % 2}" x="{left:.1f}" width="{max(0.5, right - left):.1f}" y="{MARKS:.0f}" '
            f'height="{HEIGHT - MARKS - AXIS:.0f}"><title>{escape(told)}</title></rect>'
        )


def _marks(seen: Observation, x: _Scale) -> Iterator[str]:
    """In the strip above: injections point down, actions are squares, recoveries are dots. Early ends of jobs are lines."""
    began_t, bottom = _began_t(seen), HEIGHT - AXIS
    for injection in seen.injections:
        if injection.t is None:
            continue
        place = x(min(max(injection.t, x.low), x.high))
        told = f"{injection.id}: {injection.fault} at {injection.t - began_t:.2f} s"
        yield (
            f'<g class="injection"><line x1="{place:.1f}" x2="{place:.1f}" y1="14" y2="{bottom:.0f}"/>'
            f'<path d="M{place - 6:.1f} 4h12l-6 12z"/><title>{escape(told)}</title></g>'
        )
    for line in seen.events:
        place = x(line["t"])
        told = f"{line['t'] - began_t:.2f} s: "
        match line["event"]:
            case "action":
                told += f"{line['name'].replace('_', ' ')}: {line['reason']}"
                yield f'<rect class="action" x="{place - 4:.1f}" y="18" width="8" height="8"><title>{escape(told)}</title></rect>'
            case "recovered":
                told += f"recovered at step {line['step']}, {line['downtime_s']:.2f} s down, {line['lost_steps']} steps lost"
                yield f'<circle class="recovered" cx="{place:.1f}" cy="22" r="4"><title>{escape(told)}</title></circle>'
            case "run_finished" if line["exit_code"]:
                told += f"the job ended with {line['exit_code']}"
                yield (
                    f'<g class="ended"><line x1="{place:.1f}" x2="{place:.1f}" y1="2" y2="{bottom:.0f}"/>'
                    f"<title>{escape(told)}</title></g>"
                )
