"""A verdict for people and for programs: tables on the terminal, and `verdict.json`. docs/chaos.md describes the latter."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from chaos.injectors.context import Target
from chaos.verdict.verdict import Outcome, Verdict
from resilient import strict_json
from resilient.driver.display import duration

FILE = "verdict.json"
COMPARED = ("losses", "weights")  # invariants that are told also where they hold: what was compared, and with what
VERSION = 1


def as_json(verdict: Verdict) -> dict[str, Any]:
    """What `verdict.json` holds. Keys are added, and never renamed within a version."""
    return {
        "version": VERSION,
        "experiment": verdict.experiment,
        "seed": verdict.seed,
        "ok": verdict.ok,
        "broken": verdict.broken,
        "faults": len(verdict.outcomes),
        "kinds": len({each.fault for each in verdict.outcomes}),
        "steps": verdict.steps,
        "generations": verdict.generations,
        "wall_s": round(verdict.wall_s, 3),
        "goodput": None if verdict.goodput is None else round(verdict.goodput, 6),
        "downtime_s": round(verdict.downtime_s, 3),
        "lost_steps": sum(each.lost_steps or 0 for each in verdict.outcomes),
        "checks": [asdict(check) for check in verdict.checks],
        "injections": [_rounded({**asdict(each), "ok": each.ok}) for each in verdict.outcomes],
        "left_out": dict(verdict.left_out),
    }


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) and math.isfinite(value) else value for name, value in fields.items()}


def save(verdict: Verdict, directory: Path) -> Path:
    """Write `verdict.json`; returns its path."""
    path = directory / FILE
    new = path.with_suffix(".new")
    new.write_text(strict_json.dumps(as_json(verdict), indent=1) + "\n")
    new.replace(path)
    return path


def show(verdict: Verdict, console: Console | None = None) -> None:
    """Print it."""
    (console or Console()).print(tables(verdict))


def tables(verdict: Verdict) -> RenderableType:
    """Injections, what does not hold, and the numbers of the whole."""
    parts: list[RenderableType] = [_Injections(verdict.outcomes)] if verdict.outcomes else []
    broken = [check for check in verdict.checks if not check.ok]
    for check in broken:
        parts.append(Text.assemble((f"{check.name}: ", "bold red"), check.detail))
    goodput = "unknown" if verdict.goodput is None else f"{verdict.goodput:.1%}"
    numbers = f"{verdict.steps} steps in {duration(verdict.wall_s)}, goodput {goodput}"
    holds = f"{len(verdict.checks) - len(broken)} of {len(verdict.checks)} invariants hold"
    word = ("recovered", "bold green") if verdict.ok else ("NOT AS IT SHOULD BE", "bold red")
    parts += [f"{check.name}: {check.detail}" for check in verdict.checks if check.ok and check.name in COMPARED]
    parts.append(Text.assemble((f"{verdict.experiment} ", "bold"), f"(seed {verdict.seed}): ", word, f"; {holds}; {numbers}"))
    return Group(*parts)


class _Injections:
    """The table of injections, as wide as there is room. No word is broken: where there is no room for all names, they go on in the
    next line after an underscore."""

    NAMES = ("fault", "target", "reported as", "culprit", "action", "detected", "down", "lost", "")
    NUMBERS = ("detected", "down", "lost")

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        rows, gap = [_cells(each) for each in self._outcomes], 2
        gaps = len(self.NAMES) - 1
        if sum(map(self._least, self._columns(rows))) + gap * gaps > options.max_width:
            rows, gap = [[cell.replace("_", "_\n") for cell in row] for row in rows], 1
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        left = options.max_width - gap * gaps - sum(map(self._least, self._columns(rows)))
        for column in self._columns(rows):
            least, wanted = self._least(column), max(len(line) for cell in column for line in cell.split("\n"))
            more = max(0, min(wanted - least, left))
            left -= more
            justify: Literal["right", "left"] = "right" if column[0] in self.NUMBERS else "left"
            table.add_column(column[0], width=least + more, overflow="fold", justify=justify)
        for row, each in zip(rows, self._outcomes, strict=True):
            table.add_row(*map(Text, row[:-1]), Text(row[-1], "green" if each.ok else "bold red"))
        yield table

    def _columns(self, rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
        return list(zip(self.NAMES, *rows, strict=True))

    def _least(self, column: Sequence[str]) -> int:
        """The width of its longest word; a number stays with its unit."""
        return max((len(word) for cell in column for word in ([cell] if column[0] in self.NUMBERS else cell.split())), default=0)


def _cells(each: Outcome) -> list[str]:
    return [
        each.fault,
        target(each.target),
        reported(each),
        each.culprit,
        ", ".join(each.taken).replace("_", " ") or "none",
        seconds(each.detection_s),
        seconds(each.downtime_s),
        "" if each.lost_steps is None else str(each.lost_steps),
        "ok" if each.ok else "; ".join(each.wrong),
    ]


def target(of: Target) -> str:
    """In words."""
    if of.rank is not None:
        return f"rank {of.rank}"
    return of.host or (f"node {of.node}" if of.node is not None else "the run")


def reported(outcome: Outcome) -> str:
    """As what the ledger reported an injection."""
    if outcome.kinds:
        return ", ".join(outcome.kinds)
    return f"with {outcome.covered_by}" if outcome.covered_by else "no fault"


def seconds(value: float | None) -> str:
    """Of an outcome; nothing where it is not known."""
    return "" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
