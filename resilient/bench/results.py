"""The results of a grid: `results.jsonl`, a row for each cell that was run; the table, and the best cell."""

import statistics
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
from resilient.steptime.rates import Rates, Sample, fitted, left_out, rank_correlation

FILE = "results.jsonl"
FEWEST = 3  # rows of which an order can be told
NOTHING = "n/a"
TITLES = (
    *("cell", "ranks", "step ms", "by fit", "tokens/s", "per rank", "MFU", "state", "planned", "memory", "planned"),
    *("bubble", "coll.", "transf.", "mJ/token", ""),
)


def read(directory: Path, cells: Sequence[Cell]) -> dict[str, Row]:
    """The rows of these cells that are there, by mark; the last one of each."""
    marks, found = {cell.mark for cell in cells}, every(directory / FILE)
    return {mark: row for mark, row in found.items() if mark in marks}


def every(file: Path) -> dict[str, Row]:
    """All rows of a file, by mark; the last one of each."""
    found = {}
    for line in ledger.read(file):
        try:
            row = msgspec.convert(line, built(Row))
        except (msgspec.ValidationError, RecursionError):
            continue
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
        some = any(row.state == "measured" for row in rows)
        why = "no cell tells tokens per second, by which they are compared" if some else "no cell was measured"
        raise EnvironmentUnusable(f"{why}, so that none is the best")
    speed = f"{winner.tokens_per_s_and_rank:,.0f} tokens/s and rank"
    text = f"# The fastest of {len(rows)} cells: {speed}.\n" + yaml.safe_dump(nested(winner.keys), sort_keys=False)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnusable(f"{file} cannot be written: {error.strerror}") from None
    return winner


def table(rows: Sequence[Row]) -> Table:
    """Those that were measured, the fastest first."""
    titles, lines = cells_of(rows)
    found = Table(box=None, pad_edge=False, header_style="bold")
    for number, title in enumerate(titles):
        found.add_column(title, justify="right" if 0 < number < len(titles) - 1 else "left", no_wrap=True)
    for name, values, note in lines:
        found.add_row(Text(name), *values, Text(note, style="dim"))
    return found


def cells_of(rows: Sequence[Row]) -> tuple[Sequence[str], list[tuple[str, list[str], str]]]:
    """Of a table: titles, and of each row that was measured, the fastest first, its keys, numbers and a note."""
    samples = samples_of(rows)
    rates = fitted(list(samples.values())) if samples else None
    fast = sorted((row for row in rows if row.state == "measured"), key=lambda row: -(row.tokens_per_s_and_rank or 0.0))
    notes = [f"{row.faults} fault{'s' * (row.faults > 1)}" if row.faults else "" for row in fast]
    return TITLES, [(shown_keys(row.keys), _numbers(row, rates), note) for row, note in zip(fast, notes, strict=True)]


def not_measured(rows: Sequence[Row]) -> list[str]:
    """Those that were not measured, each with the reason."""
    return [f"{row.state.replace('_', ' ')}: {shown_keys(row.keys)}: {row.why}" for row in rows if row.state != "measured"]


def samples_of(rows: Sequence[Row]) -> dict[str, Sample]:
    """What a fit of step times is made of, by mark: rows whose work was counted."""
    return {row.mark: (row.work, row.step_s.median) for row in rows if row.work is not None and row.step_s is not None}


def agreement(rows: Sequence[Row]) -> str | None:
    """How well the order by predicted step time is that of the measured ones, in a line; None with too few rows to say."""
    samples = list(samples_of(rows).values())
    if len(samples) < FEWEST:
        return None  # no order can be told of them
    steps, rates = [seconds for _, seconds in samples], fitted(samples)
    inside, outside = [rates(work) for work, _ in samples], left_out(samples)
    errors = [abs(guess / seconds - 1) for guess, seconds in zip(outside, steps, strict=True)]
    fit, alone = (NOTHING if (r := rank_correlation(each, steps)) is None else f"{r:.2f}" for each in (inside, outside))
    return (
        f"step time by work at fitted rates: rank correlation with the measured ones {fit}, and {alone} where each row is "
        f"predicted from the others, {statistics.median(errors):.0%} off in the median"
    )


def _numbers(row: Row, rates: Rates | None) -> list[str]:
    steps, memory = row.step_s, row.memory_bytes if row.tensor_bytes is None else row.tensor_bytes
    return [
        NOTHING if row.world_size is None else str(row.world_size),
        NOTHING if steps is None else f"{1000 * steps.median:,.1f} ± {500 * (steps.high - steps.low):,.1f}",
        _shown(1000 * rates(row.work) if rates is not None and row.work is not None else None, "{:,.1f}"),
        _shown(row.tokens_per_s.median if row.tokens_per_s is not None else None, "{:,.0f}"),
        _shown(row.tokens_per_s_and_rank, "{:,.0f}"),
        _shown(row.mfu, "{:.1%}"),
        *(
            NOTHING if count is None else size(count)
            for count in (row.state_bytes, row.predicted_state_bytes, memory, row.predicted_bytes)
        ),
        *(_shown(share, "{:.0%}") for share in (row.bubble, row.collectives, row.transfers)),
        _shown(None if row.joules_per_token is None else 1000 * row.joules_per_token, "{:,.2f}"),
    ]


def _shown(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
