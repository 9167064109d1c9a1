"""The drawings of the report: loss and throughput over time and over steps, with jobs, faults and what was done; nodes over time.

Pure. Colours are CSS classes of `STYLE` and of the page's own. What would fall on one another is drawn once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from resilient.drawing.chart import Scale, number, panel, safe, seconds_axis, ticks, value_scale
from resilient.drawing.timeline import moment_text, seconds_text, steps_text
from resilient.report.envelope import Envelope
from resilient.report.heat import Heat
from resilient.report.past import Fault, Job, Past

T = TypeVar("T")

WIDTH, LEFT, RIGHT = 1000.0, 64.0, 12.0
MARKS, PANEL, GAP, STRIP, AXIS = 56.0, 150.0, 26.0, 16.0, 24.0  # heights: of marks, of a panel, between them, of jobs, of the axis
BOTTOM = MARKS + 2 * PANEL + GAP
JOBS = BOTTOM + 11  # where they begin, below the last number of the axis
HEIGHT = JOBS + STRIP + AXIS
APART = 9.0  # of two marks in a row
SEEN = 3.0  # a gap of a curve that is narrower is not drawn
LINED = 60  # marks that have a line down to the axis: of more, lines would hide the curves
FEW, THIN = 500, 0.3  # where there are more faults, downtimes that are thinner than so many pixels are left out
NAMED = 6  # faults in the title of a mark
ROW, HOSTS = 17.0, 40  # of the nodes: height of one, and how many at most
NAMES = 150.0  # width of their names

NO_LOSS = f'<text class="name" x="{LEFT:.0f}" y="{MARKS + PANEL / 2:.0f}">no loss was reported</text>'
NO_STEP = f'<text class="name" x="{LEFT:.0f}" y="{MARKS + GAP + 1.5 * PANEL:.0f}">no step was finished</text>'

STYLE = """
.down { fill: var(--bad); fill-opacity: .22; } .away { fill: var(--soft); fill-opacity: .22; }
.job0 { fill: var(--rule); } .job1 { fill: var(--shade); stroke: var(--rule); } svg .job { fill: var(--ink); font-size: 10px; }
.validation { fill: var(--ground); stroke: var(--curve); stroke-width: 1.5; } .cell { fill: var(--bad); }
.stop { fill: var(--soft); }
"""


def by_time(past: Past) -> str:
    """Over time; nothing where no step was finished and nothing happened."""
    first_t, last_t = past.first_t, past.last_t
    if first_t is None or last_t is None or not (past.faults or past.steps_by_time.points() or past.loss_by_time.points()):
        return ""
    x = Scale(first_t, max(last_t, first_t + 1.0), LEFT, WIDTH - RIGHT)
    under = [*_without_job(past.jobs, x), *_down(past.faults, x)]
    spans = [(number, job, job.t, job.last_t) for number, job in enumerate(past.jobs, 1)]
    faults = [(fault.t, fault) for fault in past.faults]
    axis = seconds_axis(x, HEIGHT - 6)
    return _chart("time", past, x, first_t, under, spans, faults, axis)


def by_step(past: Past) -> str:
    """Over optimizer steps; nothing where none was finished."""
    ends = [step for job in past.jobs for step in (job.first_step, job.last_step) if step is not None]
    if not ends:
        return ""
    x = Scale(min(ends) - 1, max(*ends, min(ends) + 1), LEFT, WIDTH - RIGHT)
    spans = [
        (which, job, job.first_step - 1, job.last_step)
        for which, job in enumerate(past.jobs, 1)
        if job.first_step is not None and job.last_step is not None
    ]
    faults = [(float(fault.step), fault) for fault in past.faults if fault.step is not None]
    axis = [
        f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - 6:.0f}" text-anchor="{_anchor(x(tick))}">{number(tick)}</text>'
        for tick in ticks(x.low, x.high, 10)
    ]
    return _chart("steps", past, x, past.first_t or 0.0, (), spans, faults, axis)


def _anchor(place: float) -> str:
    """Of a text under its tick, which must not go over the edge."""
    return "end" if place > WIDTH - RIGHT - 10 else "middle"


def _chart(
    over: str,
    past: Past,
    x: Scale,
    first_t: float,
    under: Sequence[str],
    spans: Sequence[tuple[int, Job, float, float]],
    faults: Sequence[tuple[float, Fault]],
    axis: Sequence[str] | Iterator[str],
) -> str:
    """Args: under: what is drawn below the curves; spans: jobs with their number, beginning and end; faults: with their places."""
    timed = over == "time"
    losses = past.loss_by_time if timed else past.loss_by_step
    tokens = past.tokens_by_time if timed else past.tokens_by_step
    steps = past.steps_by_time if timed else past.steps_by_step
    speed = ("tokens a second", tokens) if tokens.points() else ("steps a second", steps)
    lower = MARKS + PANEL + GAP
    parts = [
        f'<div class="wide chart"><svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
        f'aria-label="loss and throughput over {over}">',
        *under,
        *(panel("loss", list(_joined(losses, x)), x, MARKS, PANEL, from_zero=False) if losses.points() else [NO_LOSS]),
        *_validations(past.validations_by_time if timed else past.validations_by_step, losses, x),
        *(panel(speed[0], list(_joined(speed[1], x)), x, lower, PANEL, from_zero=True) if speed[1].points() else [NO_STEP]),
        *_jobs(spans, x, first_t),
        *axis,
        *_marks(faults, x, first_t),
        "</svg></div>",
    ]
    return "\n".join(parts)


def _joined(curve: Envelope, x: Scale) -> Iterator[tuple[int, float, float]]:
    """Its points; generations so close to each other that one could not see the gap are one piece."""
    piece, before = 0, None
    for generation, place, value in curve.points():
        if before is not None and generation != before[0] and x(place) - x(before[1]) > SEEN:
            piece += 1
        before = generation, place
        yield piece, place, value


def _validations(found: Envelope, losses: Envelope, x: Scale) -> Iterator[str]:
    """Those that the panel of the losses has room for."""
    y = value_scale([value for _, _, value in losses.points()], MARKS, PANEL, from_zero=False)
    for _, place, value in found.points():
        if y.low <= value <= y.high:
            title = f"<title>validation loss {value:.4f}</title>"
            yield f'<circle class="validation" cx="{x(place):.1f}" cy="{y(value):.1f}" r="3">{title}</circle>'


def _without_job(jobs: Sequence[Job], x: Scale) -> Iterator[str]:
    for before, after in pairwise(jobs):
        left, right = x(before.last_t), x(after.t)
        if right - left >= 0.5:
            title = f"no job ran for {seconds_text(after.t - before.last_t)}"
            yield _rect("away", left, right, MARKS, BOTTOM - MARKS, title)


def _down(faults: Collection[Fault], x: Scale) -> Iterator[str]:
    """Where ranks stood still; of those at one place, one."""
    drawn: set[tuple[int, int]] = set()
    for each in faults:
        if each.until_t is None or not each.downtime_s:
            continue
        left, right = x(each.began_t), x(each.until_t)
        thin = len(faults) > FEW and right - left < THIN
        if not thin and (round(left), round(right)) not in drawn:
            drawn.add((round(left), round(right)))
            yield _rect("down", left, right, MARKS, BOTTOM - MARKS)


def _rect(kind: str, left: float, right: float, top: float, height: float, title: str = "") -> str:
    said = f"<title>{safe(title)}</title>" if title else ""
    wide = max(0.7, right - left)
    return f'<rect class="{kind}" x="{left:.1f}" width="{wide:.1f}" y="{top:.0f}" height="{height:.0f}">{said}</rect>'


def _jobs(spans: Sequence[tuple[int, Job, float, float]], x: Scale, first_t: float) -> Iterator[str]:
    top = JOBS
    for number_, job, begin, end in spans:
        left, right = x(begin), x(end)
        ended = f"ended with {job.exit_code}" if job.ended else "has not said how it ended"
        steps = "no step" if job.first_step is None else f"steps {job.first_step} to {job.last_step}"
        title = f"job {number_} on {job.host}, from {moment_text(job.t - first_t)}: {steps}, {job.faults} faults; {ended}"
        yield _rect(f"job{number_ % 2}", left, right, top, STRIP - 4, title)
        if right - left > 8 + 7 * len(str(number_)):
            yield f'<text class="job" x="{left + 4:.1f}" y="{top + 9.5:.1f}">{number_}</text>'
    yield f'<text class="tick" x="{LEFT - 6:.0f}" y="{top + 10:.0f}" text-anchor="end">job</text>'


# -- marks ---------------------------------------------------------------------------------------------------------------


def _marks(faults: Sequence[tuple[float, Fault]], x: Scale, first_t: float) -> Iterator[str]:
    """Above the panels: faults point down, what was done about them are squares, recoveries are dots, stops bars."""
    for place, group in _groups([(place, each) for place, each in faults if each.planned], x):
        title = "\n".join(_fault_text(each, first_t) for each in group[:NAMED])
        yield f'<rect class="stop" x="{place - 2:.1f}" y="3" width="4" height="11"><title>{safe(title)}</title></rect>'
    faults = [(place, each) for place, each in faults if not each.planned]
    acted = [(place, each) for place, each in faults if each.actions]
    recovered = [(place, each) for place, each in faults if each.until_t is not None]
    groups = list(_groups(faults, x))
    for place, group in groups:
        title = _title([_fault_text(each, first_t) for each in group[:NAMED]], Counter(each.kind for each in group), len(group))
        line = f'<line x1="{place:.1f}" x2="{place:.1f}" y1="14" y2="{BOTTOM:.0f}"/>' if len(groups) <= LINED else ""
        yield f'<g class="fault">{line}'
        yield f'<path d="M{place - 5:.1f} 3h10l-5 11z"/><title>{safe(title)}</title></g>'
    for place, group in _groups(acted, x):
        title = ", ".join(f"{count} × {name}" for name, count in Counter(name for each in group for name in each.actions).items())
        yield f'<rect class="action" x="{place - 4:.1f}" y="18" width="8" height="8"><title>{safe(title)}</title></rect>'
    for place, group in _groups(recovered, x):
        down_s = sum(each.downtime_s or 0.0 for each in group)
        again = sum(each.lost_steps or 0 for each in group)
        title = f"{len(group)} recovered: {seconds_text(down_s)} down, {steps_text(again)} computed again"
        yield f'<circle class="recovered" cx="{place:.1f}" cy="33" r="4"><title>{safe(title)}</title></circle>'


def _groups(found: Sequence[tuple[float, T]], x: Scale) -> Iterator[tuple[float, list[T]]]:
    """Those that would fall on one another, with the place of the first."""
    groups: list[tuple[float, list[T]]] = []
    for place, each in sorted(found, key=lambda item: item[0]):
        if groups and x(place) - groups[-1][0] < APART:
            groups[-1][1].append(each)
        else:
            groups.append((x(place), [each]))
    yield from groups


def _fault_text(each: Fault, first_t: float) -> str:
    done = ", ".join(each.actions) or "nothing was done"
    after = "" if each.downtime_s is None else f", {seconds_text(each.downtime_s)} down"
    what = f"{each.kind.replace('_', ' ')}, {each.culprit()}".removesuffix(", ")
    return f"{each.fault_id} at {moment_text(each.t - first_t)}: {what}: {each.detail[:160]}; {done}{after}"


def _title(lines: Sequence[str], kinds: Counter[str], count: int) -> str:
    rest = f"\n{count} in all: " + ", ".join(f"{many} {kind.replace('_', ' ')}" for kind, many in kinds.most_common())
    return "\n".join(lines) + (rest if count > len(lines) else "")


# -- nodes ---------------------------------------------------------------------------------------------------------------


def nodes(heat: Heat, past: Past, moment: Callable[[float], str]) -> str:
    """A row for each host that was in trouble, the worst first; darker where there was more. Args: moment: names a time."""
    rows = heat.rows()
    first_t, last_t = past.first_t, past.last_t
    if not rows or first_t is None or last_t is None:
        return "<p>No node has had a fault.</p>"
    x = Scale(first_t, max(last_t, first_t + 1.0), NAMES, WIDTH - RIGHT)
    shown = dict(list(rows.items())[:HOSTS])
    most = max(counts.total() for cells in shown.values() for counts in cells.values())
    height = ROW * len(shown) + AXIS
    parts = [
        f'<div class="wide chart"><svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="faults of nodes over time">'
    ]
    for row, (host, cells) in enumerate(shown.items()):
        parts += _host(host, cells, row * ROW, x, heat.width_s, most, moment)
    parts += [*seconds_axis(x, height - 6), "</svg></div>"]
    left = len(rows) - len(shown)
    return "\n".join([*parts, f'<p class="soft">and {left} hosts with fewer</p>'] if left else parts)


def _host(
    host: str, cells: Mapping[float, Counter[str]], top: float, x: Scale, width_s: float, most: int, moment: Callable[[float], str]
) -> Iterator[str]:
    name = host if len(host) <= 20 else f"{host[:19]}…"
    total = sum((counts for counts in cells.values()), Counter[str]())
    said = f"<title>{safe(_counted(host, total))}</title>"
    yield f'<text x="{NAMES - 8:.0f}" y="{top + 12:.0f}" text-anchor="end">{safe(name)}{said}</text>'
    for t, counts in cells.items():
        left, right = max(x(t), x.at_low), min(x(t + width_s), x.at_high)
        share = 0.25 + 0.75 * counts.total() / most
        title = f"<title>{safe(_counted(f'{host}, from {moment(t)}', counts))}</title>"
        yield (
            f'<rect class="cell" x="{left:.1f}" width="{max(2.0, right - left):.1f}" y="{top + 1:.0f}" height="{ROW - 3:.0f}" '
            f'fill-opacity="{share:.2f}">{title}</rect>'
        )


def _counted(what: str, counts: Counter[str]) -> str:
    return f"{what}: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
