"""The results of a grid: `results.jsonl`, a row for each cell that was run; the table, and the best cell."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml
from rich.table import Table
from rich.text import Text

from checkpoint.typed import built
from resilient import ledger
from resilient.bench.grid import Cell, nested, shown_keys
from resilient.bench.rows import Row
from resilient.driver.display import size
from resilient.exits import EnvironmentUnusable

FILE = "results.jsonl"
NOTHING = "n/a"


def read(directory: Path, cells: Sequence[Cell]) -> dict[str, Row]:
    """The rows of these cells that are there, by mark; the last one of each."""
    marks = {cell.mark for cell in cells}
    found = {}
    for line in ledger.read(directory / FILE):
        try:
            row = msgspec.convert(line, built(Row))
        except (msgspec.ValidationError, RecursionError):
            continue
        if row.mark in marks:
            found[row.mark] = row
    return found


def append(directory: Path, row: Row) -> None:
    """Add a row; what a line was cut short to is closed off first."""
    lines = ledger.JsonLines(directory / FILE)
    try:
        lines.append(msgspec.to_builtins(row))
    finally:
        lines.close()


def best(rows: Sequence[Row]) -> Row | None:
    """The one with the most tokens per second and rank."""
    fit = [row for row in rows if row.tokens_per_s_and_rank is not None]
    return max(fit, key=lambda row: row.tokens_per_s_and_rank or 0.0, default=None)


def write_best(rows: Sequence[Row], file: Path) -> Row:
    """Write the keys of the best cell as YAML, which a config can take over. Raises EnvironmentUnusable."""
    winner = best(rows)
    if winner is None:
        raise EnvironmentUnusable("no cell was measured, so that none is the best")
    speed = f"{winner.tokens_per_s_and_rank:,.0f} tokens/s and rank"
    text = f"# The fastest of {len(rows)} cells: {speed}.\n" + yaml.safe_dump(nested(winner.keys), sort_keys=False)
    try:
        file.write_text(text)
    except OSError as error:
        raise EnvironmentUnusable(f"{file} cannot be written: {error.strerror}") from None
    return winner


def table(rows: Sequence[Row]) -> Table:
    """Those that were measured, the fastest first."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column("cell", no_wrap=True)
    for title in ("ranks", "step ms", "tokens/s", "per rank", "MFU", "memory", "predicted", "mJ/token"):
        found.add_column(title, justify="right", no_wrap=True)
    found.add_column("", no_wrap=True)
    for row in sorted(rows, key=lambda row: -(row.tokens_per_s_and_rank or 0.0)):
        if row.state == "measured":
            note = f"{row.faults} fault{'s' * (row.faults > 1)}" if row.faults else ""
            found.add_row(Text(shown_keys(row.keys)), *_numbers(row), Text(note, style="dim"))
    return found


def left_out(rows: Sequence[Row]) -> list[str]:
    """Those that were not measured, each with the reason."""
    return [f"{row.state.replace('_', ' ')}: {shown_keys(row.keys)}: {row.why}" for row in rows if row.state != "measured"]


def _numbers(row: Row) -> list[str]:
    steps = row.step_s
    return [
        NOTHING if row.world_size is None else str(row.world_size),
        NOTHING if steps is None else f"{1000 * steps.median:,.1f} ± {500 * (steps.high - steps.low):,.1f}",
        _shown(row.tokens_per_s.median if row.tokens_per_s is not None else None, "{:,.0f}"),
        _shown(row.tokens_per_s_and_rank, "{:,.0f}"),
        _shown(row.mfu, "{:.1%}"),
        NOTHING if row.memory_bytes is None else size(row.memory_bytes),
        NOTHING if row.predicted_bytes is None else size(row.predicted_bytes),
        _shown(None if row.joules_per_token is None else 1000 * row.joules_per_token, "{:,.2f}"),
    ]


def _shown(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
