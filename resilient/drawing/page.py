"""Parts of HTML pages that stand alone: the document and its look, rows of numbers, tables, the bar of an account. Pure.

Pages of campaigns and of experiments are made of them. Nothing comes from outside, and the look follows the reader's choice of
light or dark: `LIGHT` and `DARK` are the colours; texts have those of `TEXTS`, on `GROUNDS`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import unescape
from typing import TypeVar

from resilient import strict_json
from resilient.account import PARTS
from resilient.drawing.chart import safe

LIGHT = {
    "ground": "#ffffff", "ink": "#1c2024", "soft": "#5c6570", "rule": "#dfe3e8", "shade": "#f3f5f7",
    "good": "#14793d", "bad": "#c01c28", "curve": "#1f5fbf", "act": "#b26a00",
}  # fmt: skip
DARK = {
    "ground": "#14171a", "ink": "#e4e7ea", "soft": "#98a2ad", "rule": "#323940", "shade": "#1d2226",
    "good": "#4cc37c", "bad": "#ff6b6b", "curve": "#6ea8ff", "act": "#e8a33d",
}  # fmt: skip
TEXTS = ("ink", "soft", "good", "bad", "curve")
GROUNDS = ("ground", "shade")

Value = TypeVar("Value", int, float, str)

_STYLE = """
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
.badge { border-radius: .3rem; color: var(--ground); font-size: 1rem; margin-left: .5rem; padding: .15rem .6rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .badge.good { background: var(--good); color: var(--ground); }
.badge.bad { background: var(--bad); color: var(--ground); } .soft { color: var(--soft); }
dl.numbers { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin: 1rem 0 0; } dl.numbers div { display: flex;
  flex-direction: column-reverse; } dl.numbers dt { color: var(--soft); font-size: .8rem; }
dl.numbers dd { font-size: 1.25rem; font-variant-numeric: tabular-nums; margin: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--rule);
  padding: .35rem 0 .35rem 1rem; text-align: left; vertical-align: top; white-space: nowrap; } td:first-child, th:first-child {
  padding-left: 0; } th { color: var(--soft); font-size: .8rem; font-weight: 600; vertical-align: bottom; white-space: normal; }
td.number, th.number { font-variant-numeric: tabular-nums; text-align: right; } td.long { min-width: 12rem;
  overflow-wrap: anywhere; white-space: normal; } td .bar { border-radius: .2rem; height: 1.1rem; min-width: 9rem; }
@media (max-width: 60rem) { td.long { min-width: 20rem; } }
svg { display: block; height: auto; width: 100%; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
.chart svg { min-width: 60rem; }
svg text.name { fill: var(--ink); font-weight: 600; } .grid { stroke: var(--rule); } .curve { fill: none; stroke: var(--curve);
  stroke-linejoin: round; stroke-width: 1.6; } .band0 { fill: none; pointer-events: all; } .band1 { fill: var(--shade); }
.injection line, .fault line { stroke: var(--bad); stroke-dasharray: 3 3; } .injection path, .fault path { fill: var(--bad); }
.action { fill: var(--act); } .recovered { fill: var(--good); } .ended line { stroke: var(--ink); stroke-width: 2; }
.key span { display: inline-block; margin-right: 1.4rem; }
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


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """The whole page. Args: body: HTML; style: further rules of CSS."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{safe(title)}</title>\n<style>{_colours()}{_STYLE}{style}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _colours() -> str:
    light, dark = ("".join(f"--{name}: {colour}; " for name, colour in colours.items()) for colours in (LIGHT, DARK))
    return f":root {{ color-scheme: light dark; {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"


def heading(title: str, kind: str, word: str) -> str:
    """The first line, with a word of how it is. Args: kind: good, bad or soft."""
    return f'<h1>{safe(title)} <span class="badge {kind}">{safe(word)}</span></h1>'


def numbers(named: Mapping[str, str]) -> Iterator[str]:
    """A row of numbers, each with its name. Args: named: HTML by name."""
    yield '<dl class="numbers">'
    yield from (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in named.items())
    yield "</dl>"


def parts_bar(seconds: Mapping[str, float], unit: str = "rank seconds") -> str:
    """A bar of the parts of an account that are not empty."""
    whole = sum(seconds.values()) or 1.0
    parts = []
    for name, spent in seconds.items():
        if spent > 0:
            title = safe(f"{name}: {spent:.1f} {unit}, {spent / whole:.1%}")
            parts.append(f'<i style="background:{_COLOURS[name]};width:{100 * spent / whole:.3f}%" title="{title}"></i>')
    return f'<div class="bar">{"".join(parts)}</div>'


def parts_rows(seconds: Mapping[str, float], key: str = "") -> Iterator[tuple[str, ...]]:
    """Rows of a table of the parts that are not empty: name with its colour, share, rank seconds, what it is.

    Args:
        key: of the account among the figures of the page.
    """
    whole = sum(seconds.values()) or 1.0
    for name, spent in seconds.items():
        if spent > 0:
            swatch = f'<i class="swatch" style="background:{_COLOURS[name]}"></i>{name}'
            spent_text = figure(f"{key}.{name}" if key else "", spent, "{:,.1f}".format)
            yield swatch, number(f"{spent / whole:.1%}"), right(spent_text), safe(PARTS[name])


def figure(key: str, value: Value, form: Callable[[Value], str]) -> str:
    """A number as people read it, with its exact value and its name among the figures of the page for programs.

    Args:
        key: empty: it has no name.
        form: makes the text of it.
    """
    text = safe(form(value))
    return f'<data data-key="{safe(key)}" value="{safe(strict_json.dumps(value))}">{text}</data>' if key else text


# -- tables ------------------------------------------------------------------------------------------------------------

LONG = 32  # characters
_TAG = re.compile("<[^>]*>")
_RIGHT = "\0"  # in front of what stands to the right of its cell


def number(text: str) -> str:
    """A cell of a number."""
    return right(safe(text))


def right(html: str) -> str:
    """A cell that stands to the right."""
    return _RIGHT + html


def coloured(text: str, kind: str) -> str:
    """A text in the colour of its kind: good, bad or soft."""
    return f'<span class="{kind}">{safe(text)}</span>'


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Cells are HTML."""
    yield '<div class="wide"><table>'
    yield f"<thead>{_row(head, 'th')}</thead><tbody>"
    yield from (_row(row, "td") for row in rows)
    yield "</tbody></table></div>"


def _row(cells: Iterable[str], tag: str) -> str:
    def cell(text: str) -> str:
        kind = ' class="number"' if text.startswith(_RIGHT) else ' class="long"' if _is_long(text) else ""
        return f"<{tag}{kind}>{text.removeprefix(_RIGHT)}</{tag}>"

    return f"<tr>{''.join(map(cell, cells))}</tr>"


def _is_long(html: str) -> bool:
    """Whether a cell has a line that is to be broken where the window is not wide enough; others are not."""
    return any(len(unescape(_TAG.sub("", line))) > LONG for line in html.split("<br/>"))
