"""The page of an experiment: one HTML file without anything from outside, to be read in a browser or sent to somebody.

`page` is pure. The look follows the reader's choice of light or dark.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from chaos.verdict.observation import Observation
from chaos.verdict.report import reported, seconds, target
from chaos.verdict.timeline import svg
from chaos.verdict.verdict import Outcome, Verdict
from resilient.drawing.page import coloured, document, heading, number, numbers, parts_bar, parts_rows, table
from resilient.driver.display import duration

FILE = "verdict.html"


def save(seen: Observation, verdict: Verdict, directory: Path) -> Path:
    """Write the page; returns its path."""
    path = directory / FILE
    path.write_text(page(seen, verdict), encoding="utf-8")
    return path


def page(seen: Observation, verdict: Verdict) -> str:
    """The whole page."""
    title = f"{verdict.experiment}, seed {verdict.seed}"
    body = [
        *_header(title, verdict),
        "<h2>Time line</h2>",
        svg(seen),
        _KEY,
        "<h2>Where the time went</h2>",
        parts_bar(seen.account.seconds),
        *table(("part", number("share"), number("rank seconds"), "what it is"), parts_rows(seen.account.seconds)),
        "<h2>Incidents</h2>",
        *_incidents(seen, verdict.outcomes),
        "<h2>Invariants</h2>",
        *table(("", "invariant", "what was found"), (_check(*each) for each in ((c.ok, c.name, c.detail) for c in verdict.checks))),
    ]
    return document(title, body)


_KEY = (
    '<p class="key soft">'
    '<span><svg viewBox="0 0 12 12" class="injection"><path d="M0 0h12l-6 12z"/></svg> injected</span>'
    '<span><svg viewBox="0 0 12 12"><rect class="action" x="2" y="2" width="8" height="8"/></svg> acted</span>'
    '<span><svg viewBox="0 0 12 12"><circle class="recovered" cx="6" cy="6" r="4"/></svg> recovered</span>'
    "<span>bands are generations; the pointer on a mark shows more</span></p>"
)


def _header(title: str, verdict: Verdict) -> Iterator[str]:
    kind, word = ("good", "recovered") if verdict.ok else ("bad", "not as it should be")
    yield heading(title, kind, word)
    if not verdict.ok:
        yield f'<p class="bad">Broken: {escape(", ".join(verdict.broken))}</p>'
    recovered = sum(each.recovered for each in verdict.outcomes)
    told = {
        "faults": str(len(verdict.outcomes)),
        "recovered": str(recovered),
        "kinds of faults": str(len({each.fault for each in verdict.outcomes})),
        "goodput": "unknown" if verdict.goodput is None else f"{verdict.goodput:.1%}",
        "downtime": duration(verdict.downtime_s),
        "steps computed again": str(sum(each.lost_steps or 0 for each in verdict.outcomes)),
        "steps": str(verdict.steps),
        "generations": str(verdict.generations),
        "wall time": duration(verdict.wall_s),
    }
    yield from numbers({name: escape(value) for name, value in told.items()})


def _incidents(seen: Observation, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What became of each injection."""
    began_t = min((float(line["t"]) for line in seen.events), default=0.0)
    costs = {incident.fault_id: incident.seconds for incident in seen.account.incidents}
    head = ("fault", "target", number("at"), "reported as", "culprit", number("detected"), number("down"), "of which",
            number("steps again"), "action", "expected", "")  # fmt: skip
    yield from table(head, (_incident(each, began_t, costs) for each in outcomes))


def _incident(each: Outcome, began_t: float, costs: dict[str, dict[str, float]]) -> Iterator[str]:
    spent: dict[str, float] = {}
    for fault in each.faults:
        for name, cost in costs.get(fault, {}).items():
            spent[name] = spent.get(name, 0.0) + cost
    yield f'{escape(each.fault)}<br/><span class="soft">{escape(each.id)}</span>'
    yield escape(target(each.target))
    yield number("" if each.t is None else f"{each.t - began_t:.1f} s")
    yield escape(reported(each))
    yield coloured(each.culprit, {"right": "good", "wrong": "bad"}.get(each.culprit, "soft"))
    yield number(seconds(each.detection_s))
    yield number(seconds(each.downtime_s))
    yield "<br/>".join(f'<span class="soft">{name}</span> {seconds(cost)}' for name, cost in spent.items() if cost >= 0.005)
    yield number("" if each.lost_steps is None else str(each.lost_steps))
    yield escape(", ".join(each.taken).replace("_", " ") or "none")
    yield escape(", ".join(each.expected).replace("_", " ") or "none")
    yield (
        coloured("ok", "good") if each.ok else "<br/>".join(coloured(f"{name}: {why}", "bad") for name, why in each.wrong.items())
    )


def _check(ok: bool, name: str, detail: str) -> tuple[str, ...]:
    return coloured("ok" if ok else "broken", "good" if ok else "bad"), escape(name), escape(detail)
