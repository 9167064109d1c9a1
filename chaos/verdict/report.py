"""A verdict for people and for programs: tables on the terminal, and `verdict.json`. docs/chaos.md describes the latter."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
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
    parts: list[RenderableType] = [_injections(verdict.outcomes)] if verdict.outcomes else []
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


def _injections(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("fault", "target", "reported as", "culprit", "action"):
        table.add_column(name, overflow="fold")
    for name in ("detected", "down", "lost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for each in outcomes:
        table.add_row(
            each.fault,
            target(each.target),
            reported(each),
            each.culprit,
            ", ".join(each.taken) or "none",
            seconds(each.detection_s),
            seconds(each.downtime_s),
            "" if each.lost_steps is None else str(each.lost_steps),
            Text("ok", "green") if each.ok else Text("; ".join(each.wrong), "bold red"),
        )
    return table


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
