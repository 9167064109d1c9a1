"""A campaign as one SVG picture: loss over time, generations and checkpoints, and each fault with what was done about it.

Pure: the lines of the ledger and of the metrics go in, a text comes out that stands alone and follows the reader's choice of light
or dark. Long runs stay small: curves are thinned, marks that would fall on one another are drawn once, and of many faults those
that cost most are listed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from resilient.drawing.chart import Scale, curves, finite, integer, number, safe, seconds_axis, ticks, value_scale
from resilient.drawing.timeline import Incident, Line, Timeline, moment_text, read, seconds_text, steps_text, whole

WIDTH, LEFT, RIGHT = 900.0, 84.0, 22.0
HEAD, MARKS, PANEL, STRIP, AXIS, KEY = 64.0, 26.0, 190.0, 16.0, 24.0, 34.0  # heights
ROW, LISTED = 21.0, 14  # height of a line of the list, and how many there are at most
APART = 17.0  # of two numbered marks, at least
TOP = HEAD + MARKS  # of the panel
STRIPS = TOP + PANEL + 12.0

_STYLE = """
svg { color-scheme: light dark; }
text { fill: #5c6570; font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
.ground { fill: #ffffff; stroke: #d9dee4; } .grid { stroke: #e6e9ed; }
.title, .name, .what, .said { fill: #1c2024; } .title, .name, .what { font-weight: 600; } .title { font-size: 15px; }
.curve { fill: none; stroke: #1f5fbf; stroke-linejoin: round; stroke-width: 1.7; }
.validation { fill: #ffffff; stroke: #1f5fbf; stroke-width: 1.5; } .checkpoint { stroke: #14793d; stroke-width: 1.5; }
.band { font-size: 10px; } .band0 { fill: #dbe6f6; } .band1 { fill: #b9d0ee; }
.down { fill: #c01c28; fill-opacity: .22; } .fault line { stroke: #c01c28; stroke-dasharray: 2 3; } .fault circle { fill: #c01c28; }
.away { fill: #6b7785; fill-opacity: .2; } .pause line { stroke: #6b7785; stroke-dasharray: 2 3; } .pause circle { fill: #6b7785; }
.mark { fill: #ffffff; font-size: 10px; font-weight: 700; } .good { fill: #14793d; } .bad { fill: #c01c28; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #9aa4af; } .title, .name, .what, .said { fill: #e4e7ea; }
  .ground { fill: #14171a; stroke: #323940; } .grid { stroke: #2a3036; }
  .curve, .validation { stroke: #6ea8ff; } .validation { fill: #14171a; } .checkpoint { stroke: #4cc37c; }
  .band0 { fill: #22344d; } .band1 { fill: #2f4a70; }
  .down { fill: #ff6b6b; fill-opacity: .3; } .fault line { stroke: #ff6b6b; } .fault circle { fill: #ff6b6b; }
  .away { fill: #98a2ad; } .pause line { stroke: #98a2ad; } .pause circle { fill: #98a2ad; }
  .mark { fill: #14171a; } .good { fill: #4cc37c; } .bad { fill: #ff6b6b; }
}
"""


def picture(events: Iterable[Line], metrics: Iterable[Line]) -> str:
    """The drawing of a run directory's lines; those without what every line has are passed over."""
    lines, steps = whole(events, metrics)
    timeline = read(lines, steps)
    x = Scale(timeline.first_t, max(timeline.last_t, timeline.first_t + 1.0), LEFT, WIDTH - RIGHT)
    rows = _rows(timeline)
    listed_top = STRIPS + 2 * STRIP + AXIS + KEY
    height = listed_top + ROW * len(rows) + (10.0 if rows else 0.0)
    body = [
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1:.0f}" height="{height - 1:.0f}" rx="6"/>',
        *_heading(timeline),
        *_absences(timeline, x),
        *_losses(timeline, steps, x),
        *_generations(timeline, x),
        *_checkpoints(timeline, x),
        *seconds_axis(x, STRIPS + 2 * STRIP + AXIS - 4),
        *_marks(timeline, x),
        *_key(STRIPS + 2 * STRIP + AXIS + 17),
        *(each for at, row in enumerate(rows) for each in _row(row, listed_top + ROW * at + 12)),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" width="{WIDTH:.0f}" '
            f'height="{height:.0f}" role="img" aria-label="{safe(_caption(timeline))}">',
            f"<style>{_STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


def _caption(timeline: Timeline) -> str:
    """The picture in a sentence."""
    faults = [each for each in timeline.incidents if not each.pause]
    well = sum(each.went_on for each in faults)
    after = "all recovered" if faults and well == len(faults) else f"{well} recovered" if faults else ""
    steps = f"{timeline.step} of {timeline.target_step} steps" if timeline.target_step else steps_text(timeline.step)
    parts = [
        f"{steps} in {moment_text(timeline.last_t - timeline.first_t)}",
        f"{len(faults)} fault{'s' * (len(faults) != 1)}",
        after,
    ]
    return f"{timeline.name or 'campaign'}: {', '.join(part for part in parts if part)}"


# -- the drawing ---------------------------------------------------------------------------------------------------------


def _heading(timeline: Timeline) -> Iterator[str]:
    yield f'<text class="title" x="18" y="27">{safe(cut(_caption(timeline), 860, 15))}</text>'
    down_s = sum(each.down_s or 0.0 for each in timeline.incidents if not each.pause)
    again = sum(each.lost_steps or 0 for each in timeline.incidents)
    under = f"{seconds_text(down_s)} down after faults, {steps_text(again)} computed again"
    paused = [each for each in timeline.incidents if each.pause and each.until_t is not None]
    if paused:
        under += f"; the command was run again {len(paused)} time{'s' * (len(paused) != 1)}"
    yield f'<text x="18" y="45">{safe(under)}</text>'


def _absences(timeline: Timeline, x: Scale) -> Iterator[str]:
    """Where no step was finished: between a fault and its recovery, and where no command ran. Those at one place are drawn once."""
    drawn: set[tuple[str, int, int]] = set()
    for each in timeline.incidents:
        if each.until_t is None or (not each.pause and each.down_s is None):
            continue
        left, right = x(each.began_t), x(each.until_t)
        kind = "away" if each.pause else "down"
        if (kind, round(left), round(right)) not in drawn:
            drawn.add((kind, round(left), round(right)))
            yield f'<rect class="{kind}" x="{left:.1f}" width="{max(1.5, right - left):.1f}" y="{TOP:.0f}" height="{PANEL:.0f}"/>'


def _losses(timeline: Timeline, metrics: Sequence[Line], x: Scale) -> Iterator[str]:
    losses = ((line, finite(line.get("loss"))) for line in metrics)
    points = [(integer(line.get("generation")), float(line["t"]), loss) for line, loss in losses if loss is not None]
    values = [got for _, _, got in points] + [value for _, value in timeline.validations]
    y = value_scale(values, TOP, PANEL, from_zero=False)
    for tick in ticks(y.low, y.high, 5):
        yield f'<line class="grid" x1="{LEFT:.0f}" x2="{WIDTH - RIGHT:.0f}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text x="{LEFT - 8:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">{number(tick)}</text>'
    yield _label("loss", TOP + 8)
    if not points:
        yield f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{TOP + PANEL / 2:.0f}" text-anchor="middle">No step was finished.</text>'
    yield from curves(points, x, y)
    for t, value in _spread(timeline.validations, x, 8.0):
        title = f"<title>validation loss {value:.4f}</title>"
        yield f'<circle class="validation" cx="{x(t):.1f}" cy="{y(value):.1f}" r="3">{title}</circle>'


def _label(text: str, y: float) -> str:
    return f'<text class="name" x="18" y="{y:.0f}">{safe(text)}</text>'


def _generations(timeline: Timeline, x: Scale) -> Iterator[str]:
    """A bar of bands, from the start of each generation to that of the next; those that would be thinner than a pixel are one."""
    yield _label("generation", STRIPS + 11)
    shown = _spread(timeline.generations, x, 1.0)
    for at, (t, generation, ranks, resumed) in enumerate(shown):
        left = x(t)
        right = x(shown[at + 1][0]) if at + 1 < len(shown) else x.at_high
        title = safe(f"generation {generation}: {ranks} ranks, from step {resumed}")
        yield (
            f'<rect class="band{at % 2}" x="{left:.1f}" width="{max(0.5, right - left):.1f}" y="{STRIPS:.0f}" '
            f'height="{STRIP - 4:.0f}"><title>{title}</title></rect>'
        )
        if right - left > 8 + 6 * len(str(generation)):
            yield f'<text class="band" x="{left + 4:.1f}" y="{STRIPS + 9.5:.1f}">{generation}</text>'


def _checkpoints(timeline: Timeline, x: Scale) -> Iterator[str]:
    top = STRIPS + STRIP
    yield _label("checkpoint", top + 10)
    for t, step in _spread(timeline.checkpoints, x, 2.5):
        yield (
            f'<line class="checkpoint" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="{top:.0f}" y2="{top + STRIP - 5:.0f}">'
            f"<title>step {step}</title></line>"
        )


def _spread(items: Sequence[Any], x: Scale, apart: float) -> list[Any]:
    """Of items that begin with a time, in order, those that are so many pixels from the one before."""
    kept: list[Any] = []
    for item in items:
        if not kept or x(item[0]) - x(kept[-1][0]) >= apart:
            kept.append(item)
    return kept


def _marks(timeline: Timeline, x: Scale) -> Iterator[str]:
    """Above the panel, a circle for each incident with its number in the list; those at one place share one, without a number."""
    yield _label("fault", HEAD + 15)
    numbers = {id(each): str(place + 1) for place, each in enumerate(_listed(timeline))}
    groups: list[list[Incident]] = []
    for each in sorted(timeline.incidents, key=lambda each: each.t):
        if groups and x(each.t) - x(groups[-1][0].t) < APART:
            groups[-1].append(each)
        else:
            groups.append([each])
    bottom = STRIPS + 2 * STRIP - 5
    for group in groups:
        place = x(group[0].t)
        kind = "pause" if all(each.pause for each in group) else "fault"
        title = "\n".join(each.title(timeline.first_t) for each in group) if len(timeline.incidents) <= 1000 else _counted(group)
        shown = [numbers[id(each)] for each in group if id(each) in numbers]
        text = shown[0] if len(group) == 1 and shown else f"{shown[0]}+" if shown else ""
        yield f'<g class="{kind}"><line x1="{place:.1f}" x2="{place:.1f}" y1="{TOP - 6:.0f}" y2="{bottom:.0f}"/>'
        yield f'<circle cx="{place:.1f}" cy="{HEAD + 11:.0f}" r="{8 if text else 4}"/>'
        if text:
            yield f'<text class="mark" x="{place:.1f}" y="{HEAD + 14.5:.1f}" text-anchor="middle">{text}</text>'
        yield f"<title>{safe(title)}</title></g>"


def _counted(group: Sequence[Incident]) -> str:
    kinds = Counter(each.what.partition(",")[0] for each in group)
    return f"{len(group)} incidents: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _key(y: float) -> Iterator[str]:
    """What the signs mean."""
    signs = (
        ('<g class="fault"><circle cx="5" cy="-4" r="5"/></g>', "fault"),
        ('<g class="pause"><circle cx="5" cy="-4" r="5"/></g>', "end of the command"),
        ('<rect class="down" x="0" y="-10" width="10" height="12"/>', "down after a fault"),
        ('<rect class="away" x="0" y="-10" width="10" height="12"/>', "down after an end of the command"),
        ('<circle class="validation" cx="5" cy="-4" r="3"/>', "validation"),
        ('<line class="checkpoint" x1="5" x2="5" y1="-10" y2="1"/>', "durable checkpoint"),
    )
    place = LEFT
    for sign, text in signs:
        yield f'<g transform="translate({place:.0f} {y:.0f})">{sign}<text x="15" y="0">{text}</text></g>'
        place += 15 + width(text, 11) + 24


# -- the list ------------------------------------------------------------------------------------------------------------


def _listed(timeline: Timeline) -> list[Incident]:
    """In the order in which they came, those that cost most; what never recovered costs most of all."""
    costs = sorted(timeline.incidents, key=lambda each: (not each.went_on, each.down_s or 0.0), reverse=True)
    chosen = {id(each) for each in costs[:LISTED]}
    return [each for each in sorted(timeline.incidents, key=lambda each: each.t) if id(each) in chosen]


def _rows(timeline: Timeline) -> list[tuple[str, Incident | str, float]]:
    """Number and incident, or a last line about the rest; with the origin of times."""
    listed = _listed(timeline)
    rows: list[tuple[str, Incident | str, float]] = [(str(at + 1), each, timeline.first_t) for at, each in enumerate(listed)]
    chosen = {id(each) for each in listed}
    rest = [each for each in timeline.incidents if id(each) not in chosen]
    return [*rows, ("", f"and {_counted(rest)}", timeline.first_t)] if rest else rows


def _row(row: tuple[str, Incident | str, float], y: float) -> Iterator[str]:
    name, each, origin_t = row
    if isinstance(each, str):
        yield f'<text x="{LEFT + 44:.0f}" y="{y:.0f}">{safe(cut(each, 720, 11))}</text>'
        return
    kind = "pause" if each.pause else "fault"
    yield f'<g class="{kind}"><circle cx="66" cy="{y - 4:.0f}" r="8"/></g>'
    yield f'<text class="mark" x="66" y="{y - 0.5:.1f}" text-anchor="middle">{name}</text>'
    yield f'<text x="{LEFT + 34:.0f}" y="{y:.0f}" text-anchor="end">{moment_text(each.t - origin_t)}</text>'
    yield f'<text class="what" x="130" y="{y:.0f}">{safe(cut(each.what, 150, 11.6))}</text>'
    yield f'<text x="292" y="{y:.0f}">{safe(cut(each.detail, 215, 11))}</text>'
    yield f'<text class="said" x="540" y="{y:.0f}">{safe(cut(each.done, 125, 11))}</text>'
    if each.down_s is not None:
        yield f'<text class="good" x="744" y="{y:.0f}" text-anchor="end">{seconds_text(each.down_s)} down</text>'
        if each.lost_steps is not None:
            yield f'<text x="878" y="{y:.0f}" text-anchor="end">{steps_text(each.lost_steps)} again</text>'
    elif each.went_on:
        yield f'<text class="good" x="744" y="{y:.0f}" text-anchor="end">went on</text>'
    elif not each.pause:
        yield f'<text class="bad" x="744" y="{y:.0f}" text-anchor="end">not recovered</text>'


def width(text: str, size: float) -> float:
    """About how wide a text is drawn, in pixels; fonts differ by a tenth."""
    narrow, wide = "iljtfrI.,:;'|!()[]/ ", "mwMW@%"
    return size * sum(0.32 if each in narrow else 0.92 if each in wide else 0.68 if each.isupper() else 0.57 for each in text)


def cut(text: str, most: float, size: float) -> str:
    """As much of a text as has room, on one line."""
    text = " ".join(text.split())
    if width(text, size) <= most:
        return text
    while text and width(text + "…", size) > most:
        text = text[:-1]
    return text.rstrip() + "…"
