"""The page of an experiment: one HTML file without anything from outside, to be read in a browser or sent to somebody.

`page` is pure. The look follows the reader's choice of light or dark.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from chaos.verdict.observation import Observation
from chaos.verdict.report import reported, seconds, target
from chaos.verdict.timeline import svg
from chaos.verdict.verdict import Outcome, Verdict
from resilient.account import PARTS, Account
from resilient.driver.display import duration

FILE = "verdict.html"

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2024; --soft: #626b75; --rule: #dfe3e8; --shade: #f3f5f7;
  --good: #14793d; --bad: #c01c28; --curve: #1f5fbf; --act: #b26a00; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e4e7ea; --soft: #98a2ad; --rule: #323940; --shade: #1d2226;
  --good: #4cc37c; --bad: #ff6b6b; --curve: #6ea8ff; --act: #e8a33d; } }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
.badge { border-radius: .3rem; color: var(--ground); font-size: 1rem; margin-left: .5rem; padding: .15rem .6rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .badge.good { background: var(--good); color: var(--ground); }
.badge.bad { background: var(--bad); color: var(--ground); } .soft { color: var(--soft); }
dl.numbers { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin: 1rem 0 0; } dl.numbers div { display: flex;
  flex-direction: column-reverse; } dl.numbers dt { color: var(--soft); font-size: .8rem; }
dl.numbers dd { font-size: 1.25rem; font-variant-numeric: tabular-nums; margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--rule);
  padding: .35rem .7rem .35rem 0; text-align: left; vertical-align: top; } th { color: var(--soft); font-size: .8rem;
  font-weight: 600; } td.number, th.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
svg { display: block; height: auto; width: 100%; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg text.name { fill: var(--ink); font-weight: 600; } .grid { stroke: var(--rule); } .curve { fill: none; stroke: var(--curve);
  stroke-linejoin: round; stroke-width: 1.6; } .band0 { fill: none; pointer-events: all; } .band1 { fill: var(--shade); }
.injection line { stroke: var(--bad); stroke-dasharray: 3 3; } .injection path { fill: var(--bad); }
.action { fill: var(--act); } .recovered { fill: var(--good); } .ended line { stroke: var(--ink); stroke-width: 2; }
.key span { margin-right: 1.4rem; white-space: nowrap; }
.key svg { display: inline-block; height: 12px; vertical-align: -1px; width: 12px; }
.bar { border-radius: .3rem; display: flex; height: 1.9rem; overflow: hidden; } .bar i { min-width: 1px; }
.swatch { border-radius: 2px; display: inline-block; height: .75rem; margin-right: .5rem; width: .75rem; }
"""

# A hue for each part, and a lightness that can be told apart on both grounds; what is productive is green.
_COLOURS = {
    "productive": "#2f9e5b",
    "data": "#5aa9e6",
    "evaluation": "#8a7fd1",
    "snapshot": "#b07cc6",
    "start": "#9aa5b1",
    "detection": "#e2574c",
    "restart": "#ee8a3c",
    "restore": "#d9b43a",
    "rework": "#c2566f",
    "link": "#7a5c3e",
    "finish": "#6b7785",
    "idle": "#c9b79c",
}


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
        *_account(seen.account),
        "<h2>Incidents</h2>",
        *_incidents(seen, verdict.outcomes),
        "<h2>Invariants</h2>",
        *_table(
            ("", "invariant", "what was found"), (_check(*each) for each in ((c.ok, c.name, c.detail) for c in verdict.checks))
        ),
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


_KEY = (
    '<p class="key soft">'
    '<span><svg viewBox="0 0 12 12" class="injection"><path d="M0 0h12l-6 12z"/></svg> injected</span>'
    '<span><svg viewBox="0 0 12 12"><rect class="action" x="2" y="2" width="8" height="8"/></svg> acted</span>'
    '<span><svg viewBox="0 0 12 12"><circle class="recovered" cx="6" cy="6" r="4"/></svg> recovered</span>'
    "<span>bands are generations; the pointer on a mark shows more</span></p>"
)


def _header(title: str, verdict: Verdict) -> Iterator[str]:
    kind, word = ("good", "recovered") if verdict.ok else ("bad", "not as it should be")
    yield f'<h1>{escape(title)} <span class="badge {kind}">{word}</span></h1>'
    if not verdict.ok:
        yield f'<p class="bad">Broken: {escape(", ".join(verdict.broken))}</p>'
    recovered = sum(each.recovered for each in verdict.outcomes)
    numbers = {
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
    yield '<dl class="numbers">'
    yield from (f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers.items())
    yield "</dl>"


def _account(account: Account) -> Iterator[str]:
    """A bar of all rank seconds, and what each part is."""
    whole = account.rank_s or 1.0
    parts = {name: spent for name, spent in account.seconds.items() if spent > 0}
    yield '<div class="bar">'
    for name, spent in parts.items():
        title = escape(f"{name}: {spent:.1f} rank seconds, {spent / whole:.1%}")
        yield f'<i style="background:{_COLOURS[name]};width:{100 * spent / whole:.3f}%" title="{title}"></i>'
    yield "</div>"
    rows = (
        (_swatch(name), _number(f"{spent / whole:.1%}"), _number(f"{spent:.1f}"), escape(PARTS[name]))
        for name, spent in parts.items()
    )
    yield from _table(("part", _number("share"), _number("rank seconds"), "what it is"), rows)


def _swatch(name: str) -> str:
    return f'<i class="swatch" style="background:{_COLOURS[name]}"></i>{name}'


def _incidents(seen: Observation, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What became of each injection."""
    began_t = min((float(line["t"]) for line in seen.events), default=0.0)
    costs = {incident.fault_id: incident.seconds for incident in seen.account.incidents}
    head = ("fault", "target", _number("at"), "reported as", "culprit", _number("detected"), _number("down"), "of which",
            _number("steps again"), "rung", "expected", "")  # fmt: skip
    yield from _table(head, (_incident(each, began_t, costs) for each in outcomes))


def _incident(each: Outcome, began_t: float, costs: dict[str, dict[str, float]]) -> Iterator[str]:
    spent: dict[str, float] = {}
    for fault in each.faults:
        for name, cost in costs.get(fault, {}).items():
            spent[name] = spent.get(name, 0.0) + cost
    yield f'{escape(each.fault)}<br/><span class="soft">{escape(each.id)}</span>'
    yield escape(target(each.target))
    yield _number("" if each.t is None else f"{each.t - began_t:.1f} s")
    yield escape(reported(each))
    yield _coloured(each.culprit, {"right": "good", "wrong": "bad"}.get(each.culprit, "soft"))
    yield _number(seconds(each.detection_s))
    yield _number(seconds(each.downtime_s))
    yield "<br/>".join(f'<span class="soft">{name}</span> {seconds(cost)}' for name, cost in spent.items() if cost >= 0.005)
    yield _number("" if each.lost_steps is None else str(each.lost_steps))
    yield escape(", ".join(each.taken).replace("_", " ") or "none")
    yield escape(", ".join(each.expected).replace("_", " ") or "none")
    yield (
        _coloured("ok", "good") if each.ok else "<br/>".join(_coloured(f"{name}: {why}", "bad") for name, why in each.wrong.items())
    )


def _check(ok: bool, name: str, detail: str) -> tuple[str, ...]:
    return _coloured("ok" if ok else "broken", "good" if ok else "bad"), escape(name), escape(detail)


# -- tables ------------------------------------------------------------------------------------------------------------

_RIGHT = "\0"  # in front of what stands to the right of its cell


def _number(text: str) -> str:
    return _RIGHT + escape(text)


def _coloured(text: str, kind: str) -> str:
    return f'<span class="{kind}">{escape(text)}</span>'


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Cells are HTML."""
    yield '<div class="wide"><table>'
    yield f"<thead>{_row(head, 'th')}</thead><tbody>"
    yield from (_row(row, "td") for row in rows)
    yield "</tbody></table></div>"


def _row(cells: Iterable[str], tag: str) -> str:
    def cell(text: str) -> str:
        kind = ' class="number"' if text.startswith(_RIGHT) else ""
        return f"<{tag}{kind}>{text.removeprefix(_RIGHT)}</{tag}>"

    return f"<tr>{''.join(map(cell, cells))}</tr>"
