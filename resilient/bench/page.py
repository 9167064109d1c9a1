"""The page of a bench: its numbers, what was not measured, and drawings of speed, step time, memory and communication. Pure."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from resilient.bench import results
from resilient.bench.grid import shown_keys
from resilient.bench.rows import Row
from resilient.drawing.chart import Scale, number, safe, ticks
from resilient.drawing.page import coloured, document, heading, numbers, right, table
from resilient.driver.display import size
from resilient.steptime.rates import fitted

WIDTH, RIGHT = 720.0, 16.0
ROW, HALF, AXIS = 30.0, 9.0, 22.0  # heights: of a cell, of one of its two bars, of the axis
LETTER, LONGEST = 6.4, 46  # width of a letter of a name, and how many of them there is room for

STYLE = """
.chart svg { max-width: 56rem; min-width: 45rem; } .chart { margin-bottom: .4rem; }
.bar0 { fill: var(--curve); } .bar1 { fill: var(--act); } .bar2 { fill: var(--soft); } svg .cell { fill: var(--ink); }
.spread { stroke: var(--ink); stroke-width: 1.4; }
"""
_KEY = '<p class="key">{}</p>'


class Bar(NamedTuple):
    """One of a cell's bars. Args: kind: 0 to 2, its colour; spread: quartiles."""

    kind: int
    value: float
    said: str
    spread: tuple[float, float] | None = None


def drawn(name: str, about: str, rows: Sequence[Row], cells: int) -> str:
    """The whole page. Args: cells: of the grid, which may not all have been run yet."""
    fast = sorted((row for row in rows if row.state == "measured"), key=lambda row: -(row.tokens_per_s_and_rank or 0.0))
    word, kind = ("complete", "good") if len(rows) == cells else (f"{len(rows)} of {cells} cells", "soft")
    best = results.best(rows)
    told = {"cells": str(cells), "measured": str(len(fast)), "not measured": str(len(rows) - len(fast))}
    if best is not None:
        told |= {"the fastest": safe(shown_keys(best.keys)), "tokens/s and rank": f"{best.tokens_per_s_and_rank:,.0f}"}
    said = results.agreement(rows)
    body = [
        heading(f"Bench {name}", kind, word),
        f'<p class="soft">{safe(about)}</p>' if about else "",
        *numbers(told),
        *_drawings(fast),
        f'<p class="soft">{safe(said)}.</p>' if said is not None else "",
        *_measured(fast),
        *_left_out(rows),
    ]
    return document(f"Bench {name}", filter(None, body), STYLE)


def _drawings(rows: Sequence[Row]) -> Iterator[str]:
    samples = results.samples_of(rows)
    rates = fitted(list(samples.values())) if samples else None
    speed = [(row, [Bar(0, row.tokens_per_s_and_rank, f"{row.tokens_per_s_and_rank:,.0f} tokens/s")])
             for row in rows if row.tokens_per_s_and_rank]  # fmt: skip
    yield from _drawing("Tokens a second and rank", speed, ())
    times = []
    for row in rows:
        if row.step_s is not None:
            steps = row.step_s
            bars = [Bar(0, 1000 * steps.median, f"{1000 * steps.median:,.1f} ms", (1000 * steps.low, 1000 * steps.high))]
            if rates is not None and row.work is not None:
                bars.append(Bar(1, 1000 * rates(row.work), f"{1000 * rates(row.work):,.1f} ms by the fit"))
            times.append((row, bars))
    yield from _drawing("A step, ms", times, ("measured, with its quartiles", "by its work at fitted rates"))
    yield from _drawing("Memory of rank 0, MiB", _memory(rows), ("tensors at their most, measured", "planned"))
    shares = []
    for row in rows:
        named = (
            (row.collectives, "collectives"),
            (row.transfers, "transfers between stages"),
            (row.bubble, "bubble, by arithmetic"),
        )
        bars = [Bar(kind, 100 * share, f"{share:.0%} {what}") for kind, (share, what) in enumerate(named) if share is not None]
        if bars:
            shares.append((row, bars))
    yield from _drawing(
        "Share of a step, %", shares, ("collectives under way", "transfers between stages under way", "bubble, by arithmetic")
    )


def _memory(rows: Sequence[Row]) -> list[tuple[Row, list[Bar]]]:
    """Tensors where they were counted; else what the meter says."""
    found = []
    for row in rows:
        both = ((0, row.memory_bytes if row.tensor_bytes is None else row.tensor_bytes), (1, row.predicted_bytes))
        bars = [Bar(kind, count / 2**20, size(count)) for kind, count in both if count is not None]
        if bars:
            found.append((row, bars))
    return found


def _drawing(title: str, cells: Sequence[tuple[Row, list[Bar]]], key: Sequence[str]) -> Iterator[str]:
    """Bars of each cell from the left, under its name. Args: key: what colours mean."""
    if not cells:
        return
    names = [_name(row) for row, _ in cells]
    left = min(LONGEST, max(map(len, names))) * LETTER + 16
    most = max(max(bar.value, bar.spread[1] if bar.spread else 0.0) for _, bars in cells for bar in bars) or 1.0
    marks = ticks(0.0, most, 6)
    x = Scale(0.0, max(most, *marks), left, WIDTH - RIGHT)
    row_height = max(ROW, HALF * max(len(bars) for _, bars in cells) + 12)
    bottom = row_height * len(cells)
    yield f"<h2>{safe(title)}</h2>"
    if key:
        swatches = (f'<span><svg viewBox="0 0 12 12"><rect class="bar{kind}" width="12" height="12"/></svg> {what}</span>'
                    for kind, what in enumerate(key))  # fmt: skip
        yield _KEY.format("".join(swatches))
    yield f'<div class="wide chart"><svg viewBox="0 0 {WIDTH:.0f} {bottom + AXIS:.0f}" role="img" aria-label="{safe(title)}">'
    for mark in marks:
        yield f'<line class="grid" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="0" y2="{bottom:.0f}"/>'
        yield f'<text class="tick" x="{x(mark):.1f}" y="{bottom + 15:.0f}" text-anchor="middle">{number(mark)}</text>'
    for place, (name, (row, bars)) in enumerate(zip(names, cells, strict=True)):
        middle = row_height * (place + 0.5)
        full = f"<title>{safe(shown_keys(row.keys))}</title>"
        yield f'<text class="cell" x="{left - 8:.0f}" y="{middle + 4:.1f}" text-anchor="end">{safe(name)}{full}</text>'
        for number_, bar in enumerate(bars):
            yield from _bar(bar, x, middle + HALF * (number_ - len(bars) / 2))
    yield "</svg></div>"


def _bar(bar: Bar, x: Scale, top: float) -> Iterator[str]:
    wide, title = max(0.5, x(bar.value) - x.at_low), f"<title>{safe(bar.said)}</title>"
    rect = f'x="{x.at_low:.1f}" y="{top + 0.5:.1f}" width="{wide:.1f}" height="{HALF - 1:.1f}"'
    yield f'<rect class="bar{bar.kind}" {rect}>{title}</rect>'
    if bar.spread is not None:
        low, high = (x(end) for end in bar.spread)
        yield f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{top + HALF / 2:.1f}" y2="{top + HALF / 2:.1f}"/>'


def _name(row: Row) -> str:
    text = shown_keys(row.keys)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _measured(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "<h2>Measured, the fastest first</h2>"
        titles, lines = results.cells_of(rows)
        head = [each if number_ in (0, len(titles) - 1) else right(each) for number_, each in enumerate(titles)]
        yield from table(head, ([safe(name), *(right(safe(each)) for each in values), safe(note)] for name, values, note in lines))


def _left_out(rows: Sequence[Row]) -> Iterator[str]:
    without = [row for row in rows if row.state != "measured"]
    if without:
        yield "<h2>Not measured</h2>"
        cells = ([safe(shown_keys(row.keys)), coloured(row.state.replace("_", " "), "bad"), safe(row.why)] for row in without)
        yield from table(("cell", "", "why"), cells)
