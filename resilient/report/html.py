"""The report as one HTML file without anything from outside, to be read in a browser or sent to somebody. Pure.

What `resilient status` says, too, is taken from the same summary, and stands in `data` elements with its key and its exact value.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.config.errors import shown_change
from resilient.drawing.chart import safe
from resilient.drawing.page import coloured, document, figure, heading, number, numbers, parts_bar, parts_rows, right, table
from resilient.drawing.timeline import seconds_text
from resilient.driver.display import duration, local_time, size
from resilient.redaction import hidden
from resilient.report import charts
from resilient.report.past import Fault, Job, Past
from resilient.status import STATES, Summary

LISTED, NEWEST = 100, 20  # incidents that are listed; how many of them, and jobs, because they are the newest
CHANGES = 200  # of the config that are listed, the newest
JOBS = 200
PHASE_S = 0.005  # of a downtime: shorter ones are left out

_LAYOUT = {"fuller": "replicas with the most micro batches", "longer": "replicas that compute longer"}  # names of its members
_BADGES = {"running": "good", "reached": "good", "gave up": "bad", "interrupted": "bad", "ended": "bad"}
_STYLE = (
    charts.STYLE
    + """
pre { background: var(--shade); overflow-x: auto; padding: .8rem; } summary { cursor: pointer; }
a { color: var(--curve); } details { margin-top: 1rem; }
"""
)


@dataclass(frozen=True)
class Subject:
    """What is reported on.

    Attributes:
        past: read after the summary; it may know of a little more.
        made_t: unix seconds.
        stacks: where the stacks of an incident lie, as links from the page, by fault id.
        config: text of its config, without what is secret; empty: there is none.
        every_s: the page is loaded anew so often; None: it is a file.
    """

    where: str
    summary: Summary
    past: Past
    made_t: float
    stacks: Mapping[str, str]
    config: str = ""
    every_s: float | None = None


def page(subject: Subject) -> str:
    """The whole page."""
    summary, past = subject.summary, subject.past
    title = summary.name or "campaign"
    body = [
        heading(title, _BADGES.get(summary.state, "soft"), summary.state),
        f'<p class="soft">{safe(subject.where)}, as of {moment(subject.made_t)}</p>',
        *_notes(summary),
        *numbers(_numbers(summary)),
        "<h2>Loss and throughput over time</h2>",
        *([drawn, _KEY] if (drawn := charts.by_time(past)) else ["<p>No step was finished.</p>"]),
        *(["<h2>Over steps</h2>", by_step] if (by_step := charts.by_step(past)) else []),
        "<h2>Where the time went</h2>",
        *_account(summary),
        "<h2>Jobs</h2>",
        *_jobs(past, summary),
        "<h2>Incidents</h2>",
        *_incidents(subject),
        "<h2>Nodes</h2>",
        charts.nodes(past.heat, past, moment),
        *_bad_nodes(summary),
        "<h2>Checkpoints</h2>",
        *_checkpoints(past),
        *_storage(past),
        "<h2>Layout and config</h2>",
        *(_setup(subject) or ["<p>Nothing is known of them.</p>"]),
    ]
    text = document(title, body, _STYLE)
    if subject.every_s is None:
        return text
    return text.replace("<title>", f'<meta http-equiv="refresh" content="{subject.every_s:g}"/>\n<title>', 1)


def moment(t: float) -> str:
    """A time of this machine's clock."""
    return local_time(t, "%Y-%m-%d %H:%M:%S")


def _time(t: float) -> str:
    return f"<time>{moment(t)}</time>"


_KEY = (
    '<p class="key soft">'
    '<span><svg viewBox="0 0 12 12" class="fault"><path d="M0 0h12l-6 12z"/></svg> fault</span>'
    '<span><svg viewBox="0 0 12 12"><rect class="action" x="2" y="2" width="8" height="8"/></svg> acted</span>'
    '<span><svg viewBox="0 0 12 12"><circle class="recovered" cx="6" cy="6" r="4"/></svg> recovered</span>'
    '<span><svg viewBox="0 0 12 12"><rect class="stop" x="4" width="4" height="12"/></svg> job was to stop</span>'
    '<span><svg viewBox="0 0 12 12"><rect class="down" width="12" height="12"/></svg> down after a fault</span>'
    '<span><svg viewBox="0 0 12 12"><rect class="away" width="12" height="12"/></svg> no job ran</span>'
    '<span><svg viewBox="0 0 12 12"><circle class="validation" cx="6" cy="6" r="4"/></svg> validation loss</span>'
    "<span>the pointer on a mark shows more</span></p>"
)


# -- of the summary ------------------------------------------------------------------------------------------------------


def figures(summary: Summary) -> Iterator[tuple[str, str, float | int, Any]]:
    """What is known of the campaign: name, key in the summary, value, and what makes the text of it."""
    found: tuple[tuple[str, str, float | int | None, Any], ...] = (
        ("step", "step", summary.step, "{:,}".format),
        ("target step", "target_step", summary.target_step, "{:,}".format),
        ("left", "left_s", summary.left_s if summary.state == "running" else None, duration),
        ("expected end", "expected_end_t", summary.expected_end_t, moment),
        ("loss", "loss", summary.loss, "{:.4f}".format),
        ("validation loss", "validation_loss", summary.validation_loss, "{:.4f}".format),
        ("skipped as bad", "skipped", summary.skipped or None, "the last {:,} batches".format),
        ("speed", "tokens_per_s", summary.tokens_per_s, "{:,.0f} tokens/s".format),
        ("speed in steps", "steps_per_s", summary.steps_per_s, "{:.3g} steps/s".format),
        ("goodput", "goodput", summary.goodput, "{:.1%}".format),
        ("with the queue", "chain_goodput", summary.chain_goodput, "{:.1%}".format),
        ("wall time of jobs", "wall_s", summary.wall_s, duration),
        ("without a job", "queued_s", summary.queued_s, duration),
        ("faults", "faults", summary.faults, "{:,}".format),
        ("recovered", "recovered", summary.recovered, "{:,}".format),
        ("downtime", "downtime_s", summary.downtime_s, seconds_text),
        ("steps computed again", "lost_steps", summary.lost_steps, "{:,}".format),
        ("generation", "generation", summary.generation, "{:,}".format),
        ("newest checkpoint", "checkpoint_step", summary.checkpoint_step, "step {:,}".format),
        ("its age", "checkpoint_age_s", summary.checkpoint_age_s, duration),
        ("last exit code", "last_exit_code", summary.last_exit_code, str),
    )
    for name, key, value, form in found:
        if value is not None:
            yield name, key, value, form


def _numbers(summary: Summary) -> dict[str, str]:
    return {name: figure(key, value, form) for name, key, value, form in figures(summary)}


def _notes(summary: Summary) -> Iterator[str]:
    origin = summary.forked_from
    if origin is not None:
        yield f"<p>Branched off {safe(str(origin.get('parent')))} at step {safe(str(origin.get('step')))}.</p>"
    for each in summary.accepted:
        old, new = hidden(each["key"], each["old"]), hidden(each["key"], each["new"])
        yield f"<p>Accepted: {safe(each['key'])} {safe(' → '.join(shown_change(old, new)))}</p>"


def _account(summary: Summary) -> Iterator[str]:
    if not sum(summary.rank_seconds.values()):
        yield "<p>Nothing was computed.</p>"
        return
    yield parts_bar(summary.rank_seconds)
    head = ("part", number("share"), number("rank seconds"), "what it is")
    yield from table(head, parts_rows(summary.rank_seconds, "rank_seconds"))


def _bad_nodes(summary: Summary) -> Iterator[str]:
    if summary.bad_nodes:
        yield "<p>Further jobs do without:</p>"
        yield from table(
            ("host", "until", "why"),
            (
                (safe(each["host"]), figure(f"bad_nodes.{at}.until_t", each["until_t"], moment), safe(each["reason"]))
                for at, each in enumerate(summary.bad_nodes)
            ),
        )


# -- of the past -----------------------------------------------------------------------------------------------------------


def _jobs(past: Past, summary: Summary) -> Iterator[str]:
    head = (number("job"), "host", "began", number("took"), number("without a job before"), "steps", number("generations"),
            number("faults"), number("down"), number("steps again"), "where its time went", "end")  # fmt: skip
    runs = {run["t"]: (at, run) for at, run in enumerate(summary.runs)}
    count = len(past.jobs)
    if not count:
        yield "<p>No job has started.</p>"
    else:
        first = max(0, count - NEWEST)
        yield from table(head, (_job(past.jobs, at, summary.state, runs) for at in range(first, count)))
        if first:
            earlier = range(max(0, first - JOBS), first)
            yield f"<details><summary>the {len(earlier)} before these, of {count:,} in all</summary>"
            yield from table(head, (_job(past.jobs, at, summary.state, runs) for at in earlier))
            yield "</details>"
    if summary.jobs:
        yield "<h3>In Slurm</h3>"
        rows = list(enumerate(summary.jobs))[-JOBS:]
        yield from table(
            ("job", "state", number("from step"), "submitted", "began", "ended", ""), (_slurm_job(at, job) for at, job in rows)
        )


def _job(jobs: Sequence[Job], at: int, state: str, runs: Mapping[float, tuple[int, Mapping[str, Any]]]) -> Iterator[str]:
    """A row. Args: runs: what the summary has of the newest jobs, with their numbers there, by when they began."""
    job = jobs[at]
    place, run = runs.get(job.t, (0, {}))

    def told(key: str, own: int) -> str:
        return figure(f"runs.{place}.{key}" if run else "", run.get(key, own), "{:,}".format)

    yield number(str(at + 1))
    yield safe(job.host)
    yield _time(job.t)
    yield number(duration(run["until_t"] - run["t"] if run else job.last_t - job.t))
    yield number(duration(max(0.0, job.t - jobs[at - 1].last_t)) if at else "")
    yield "none" if job.first_step is None else f"{job.first_step:,} to {told('step', job.last_step or 0)}"
    yield number(f"{job.generations:,}")
    yield right(told("faults", job.faults))
    yield number(seconds_text(job.downtime_s) if job.downtime_s else "")
    yield right(told("lost_steps", job.lost_steps) if run.get("lost_steps", job.lost_steps) else "")
    yield parts_bar(run["seconds"], "s") if run else ""
    code = job.exit_code
    if code is not None:
        yield f"{STATES.get(code, 'ended')} ({told('exit_code', code)})"
    else:
        yield "runs" if state == "running" and at == len(jobs) - 1 else "without a last word"


def _slurm_job(at: int, job: Mapping[str, Any]) -> Iterator[str]:
    """A row. Args: at: its number in the summary."""
    yield safe(job["job"])
    yield safe(job["state"])
    yield right("" if job["step"] is None else figure(f"jobs.{at}.step", job["step"], "{:,}".format))
    for key in ("submitted_t", "started_t", "ended_t"):
        yield "" if job[key] is None else figure(f"jobs.{at}.{key}", job[key], moment)
    yield safe(job["reason"])


def listed(past: Past) -> list[Fault]:
    """The newest faults and those that cost most, in the order in which they came."""
    faults = [each for each in past.faults if not each.planned]
    newest = faults[-NEWEST:]
    older = sorted(faults[:-NEWEST], key=lambda each: (each.until_t is None, each.downtime_s or 0.0), reverse=True)
    return sorted([*older[: LISTED - len(newest)], *newest], key=lambda each: each.t)


def _incidents(subject: Subject) -> Iterator[str]:
    past = subject.past
    shown_ = listed(past)
    if not shown_:
        yield "<p>There was no fault.</p>"
        return
    kinds = subject.summary.kinds
    counts = sorted(((kind["faults"], name) for name, kind in kinds.items()), reverse=True)
    told = (f"{figure(f'kinds.{name}.faults', count, '{:,}'.format)} {safe(name.replace('_', ' '))}" for count, name in counts)
    yield f"<p>By kind: {', '.join(told)}.</p>"
    if (count := past.kinds.total()) > len(shown_):
        yield f'<p class="soft">{len(shown_)} of {count:,} are listed: the newest, and those that cost most</p>'
    known = {each["fault_id"]: each for each in subject.summary.incidents}
    head = ("incident", "kind", "culprit", number("step"), "what was done", number("down"), "of which",
            number("steps again"), "evidence")  # fmt: skip
    yield from table(head, (_incident(each, known.get(each.fault_id, {}), subject.stacks.get(each.fault_id)) for each in shown_))


def _incident(each: Fault, known: Mapping[str, Any], stacks: str | None) -> Iterator[str]:
    """A row. Args: known: what the summary has of it; stacks: a link."""
    yield f'{safe(each.fault_id)}<br/><span class="soft">{_time(each.t)}</span>'
    yield safe(each.kind.replace("_", " "))
    yield safe(each.culprit() or "the job")
    yield number("" if each.step is None else f"{each.step:,}")
    yield f'{safe(", ".join(each.actions) or "nothing")}<br/><span class="soft">{safe(each.reason[:200])}</span>'
    yield number(each.down()) if each.downtime_s is not None else right(coloured(each.down(), "soft"))
    yield "<br/>".join(
        f'<span class="soft">{part}</span> {figure(f"incidents.{each.fault_id}.seconds.{part}", spent, seconds_text)}'
        for part, spent in known.get("seconds", {}).items()
        if spent >= PHASE_S
    )
    lost_key = f"incidents.{each.fault_id}.lost_steps" if known.get("lost_steps") is not None else ""
    yield right("" if each.lost_steps is None else figure(lost_key, each.lost_steps, "{:,}".format))
    link = f' <a href="{safe(stacks)}">stacks</a>' if stacks is not None else ""
    yield f'{safe(each.detail[:300])}<br/><span class="soft">{safe(each.evidence[:300])}</span>{link}'


def _checkpoints(past: Past) -> Iterator[str]:
    if not past.tiers:
        yield "<p>Nothing was saved.</p>"
        return
    head = ("tier", number("snapshots"), number("each"), number("written with"), number("stall, mean"), number("longest"), "every",
            number("newest step"), number("checkpoints committed"), number("refused"))  # fmt: skip
    yield from table(head, (_tier(name, past) for name in past.tiers))
    if past.refused:
        yield "<h3>Checkpoints that were passed over</h3>"
        yield from table(
            ("when", number("step"), "tier", "why"),
            ((_time(each["t"]), number(str(each["step"])), safe(str(each.get("tier", ""))), safe(each["reason"][:300]))
             for each in past.refused),
        )  # fmt: skip


def _tier(name: str, past: Past) -> Iterator[str]:
    tier = past.tiers[name]
    some = tier.snapshots > 0
    yield safe(name)
    yield number(f"{tier.snapshots:,}")
    yield number(size(tier.size_bytes / tier.snapshots) if some else "")
    yield number(f"{size(tier.size_bytes / tier.write_s)}/s" if tier.write_s > 0 else "")
    yield number(f"{1e3 * tier.stall_s / tier.snapshots:,.1f} ms" if some else "")
    yield number(f"{1e3 * tier.longest_stall_s:,.1f} ms" if some else "")
    yield safe("" if tier.every_steps is None else f"{tier.every_steps:,} steps")
    yield number(f"{tier.last_step:,}" if some else "")
    yield number(f"{tier.committed:,}" if tier.committed else "")
    yield number(f"{tier.refused:,}" if tier.refused else "")


def _storage(past: Past) -> Iterator[str]:
    if past.storage:
        yield "<h3>Storage faults</h3>"
        if (count := past.kinds["storage"]) > len(past.storage):
            yield f'<p class="soft">the last {len(past.storage)} of {count:,}</p>'
        yield from table(
            ("when", "culprit", "what", number("over after")),
            ((_time(each.t), safe(each.culprit()), safe(each.detail[:300]),
              number("" if each.until_t is None else duration(each.until_t - each.t))) for each in past.storage),
        )  # fmt: skip


def _setup(subject: Subject) -> list[str]:
    config = [f"<details><summary>config.yaml</summary><pre>{safe(subject.config)}</pre></details>"] if subject.config else []
    return [*_layout(subject.past), *_changes(subject.past.jobs), *config]


def _layout(past: Past) -> Iterator[str]:
    layout = {**(past.jobs[-1].layout if past.jobs else {}), **past.layout}
    if layout:
        told = {str(name): value for name, value in layout.items() if name != "longer" or value}
        named = {_LAYOUT.get(name, name.replace("_", " ")): value for name, value in told.items()}
        yield from numbers({safe(name): safe(str(value)) for name, value in named.items()})


def _changes(jobs: Sequence[Job]) -> Iterator[str]:
    """What changed between jobs; a layout that differs counts as well."""
    rows: list[tuple[str, ...]] = []
    before: Mapping[str, Any] | None = None
    for at, job in enumerate(jobs, 1):
        for line in job.changes:
            old, new = (hidden(line["key"], line.get(which)) for which in ("from", "to"))
            note = "accepted" if line.get("accepted") is True else ""
            rows.append((number(str(at)), _time(job.t), safe(line["key"]), *map(safe, shown_change(old, new)), note))
        earlier = job.layout if before is None else before
        for key in sorted({*job.layout, *earlier}):
            old, new = earlier.get(key), job.layout.get(key)
            if old != new:
                rows.append((number(str(at)), _time(job.t), safe(f"layout: {key}"), *map(safe, shown_change(old, new)), ""))
        before = job.layout
    if rows:
        yield "<h3>What changed between jobs</h3>"
        if len(rows) > CHANGES:
            yield f'<p class="soft">the last {CHANGES} of {len(rows):,}</p>'
        yield from table((number("job"), "when", "key", "before", "after", ""), rows[-CHANGES:])
