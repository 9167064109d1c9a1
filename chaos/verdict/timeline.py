"""The time line of an experiment as an SVG drawing: loss and throughput, with what was injected and what was done about it.

Pure. Colours are CSS classes of the page that it stands in; each mark has a title, which browsers show under the pointer.
"""

from collections.abc import Iterator, Sequence
from html import escape

from chaos.verdict.matching import Line
from chaos.verdict.observation import Observation
from resilient.drawing.chart import Scale, of_lines, panel, seconds_axis

WIDTH, LEFT, RIGHT = 1000.0, 64.0, 12.0
MARKS, PANEL, GAP, AXIS = 44.0, 150.0, 26.0, 26.0  # heights: strip of marks, of a panel, between panels, of the axis
HEIGHT = MARKS + 2 * PANEL + GAP + AXIS


def svg(seen: Observation) -> str:
    """The drawing; a sentence where no step was computed."""
    if not seen.metrics:
        return "<p>No step was computed.</p>"
    began_t = _began_t(seen)
    ended_t = max([line["t"] for line in (*seen.events, *seen.metrics)])
    x = Scale(began_t, ended_t, LEFT, WIDTH - RIGHT)
    top, under = MARKS, MARKS + PANEL + GAP
    parts = [
        f'<div class="wide chart"><svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        'aria-label="loss and throughput over time">',
        *_bands(seen, x),
        *panel("loss", of_lines(seen.metrics, lambda line: line.get("loss")), x, top, PANEL, from_zero=False),
        *panel(*_throughput(seen.metrics), x, under, PANEL, from_zero=True),
        *seconds_axis(x, HEIGHT - 8),
        *_marks(seen, x),
        "</svg></div>",
    ]
    return "\n".join(parts)


def _began_t(seen: Observation) -> float:
    return float(min(line["t"] for line in (*seen.events, *seen.metrics)))


def _throughput(metrics: Sequence[Line]) -> tuple[str, list[tuple[int, float, float]]]:
    if any(line.get("tokens_per_s") for line in metrics):
        return "tokens a second", of_lines(metrics, lambda line: line.get("tokens_per_s"))
    return "steps a second", of_lines(metrics, lambda line: 1 / line["step_s"] if line.get("step_s") else None)


# -- bands and marks ---------------------------------------------------------------------------------------------------


def _bands(seen: Observation, x: Scale) -> Iterator[str]:
    """A band for each generation, from its start to the next one's, every other one shaded."""
    starts = [line for line in seen.events if line["event"] == "generation_started"]
    ends = [*(line["t"] for line in starts[1:]), x.high]
    for number, (line, end) in enumerate(zip(starts, ends, strict=False)):
        left, right = x(line["t"]), x(max(end, line["t"]))
        text = f"generation {line['generation']}: {line['world_size']} ranks, from step {line['resumed_step'] or 0}"
        yield (
            f'<rect class="band{number % 2}" x="{left:.1f}" width="{max(0.5, right - left):.1f}" y="{MARKS:.0f}" '
            f'height="{HEIGHT - MARKS - AXIS:.0f}"><title>{escape(text)}</title></rect>'
        )


def _marks(seen: Observation, x: Scale) -> Iterator[str]:
    """In the strip above: injections point down, actions are squares, recoveries are dots. Early ends of jobs are lines."""
    began_t, bottom = _began_t(seen), HEIGHT - AXIS
    for injection in seen.injections:
        if injection.t is None:
            continue
        place = x(min(max(injection.t, x.low), x.high))
        text = f"{injection.id}: {injection.fault} at {injection.t - began_t:.2f} s"
        yield (
            f'<g class="injection"><line x1="{place:.1f}" x2="{place:.1f}" y1="14" y2="{bottom:.0f}"/>'
            f'<path d="M{place - 6:.1f} 4h12l-6 12z"/><title>{escape(text)}</title></g>'
        )
    for line in seen.events:
        place = x(line["t"])
        text = f"{line['t'] - began_t:.2f} s: "
        match line["event"]:
            case "action":
                text += f"{line['name'].replace('_', ' ')}: {line['reason']}"
                title = f"<title>{escape(text)}</title>"
                yield f'<rect class="action" x="{place - 4:.1f}" y="18" width="8" height="8">{title}</rect>'
            case "recovered":
                text += f"recovered at step {line['step']}, {line['downtime_s']:.2f} s down, {line['lost_steps']} steps lost"
                yield f'<circle class="recovered" cx="{place:.1f}" cy="22" r="4"><title>{escape(text)}</title></circle>'
            case "run_finished" if line["exit_code"]:
                text += f"the job ended with {line['exit_code']}"
                yield (
                    f'<g class="ended"><line x1="{place:.1f}" x2="{place:.1f}" y1="2" y2="{bottom:.0f}"/>'
                    f"<title>{escape(text)}</title></g>"
                )
