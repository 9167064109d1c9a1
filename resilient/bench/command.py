"""`resilient bench`: the cells of a grid, one after the other; those that were run before are not run again."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from resilient.bench import results
from resilient.bench.grid import Cell, Grid, read, shown_keys
from resilient.bench.page import drawn
from resilient.bench.running import run_cell
from resilient.driver.display import duration
from resilient.interruption import interruptible

RESULTS = Path("runs/bench")
WIDTH = 200  # of the table, which a narrow terminal wraps: no number is cut off


def bench(file: Path, *, directory: Path | None, again: bool, best: Path | None) -> None:
    """Run what has not been run, and print the table.

    Args:
        directory: for results; None: `runs/bench/NAME`.
        again: cells that were not measured before are run once more.
        best: gets the keys of the fastest cell, as YAML.

    Raises:
        ForeseenError: the grid cannot be read, or somebody wants the end.
    """
    grid, cells = read(file)
    directory = directory or RESULTS / grid.name
    directory.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    with interruptible("the same command goes on with the cell that was running"):
        for cell in cells:
            known = results.read(directory, cells)
            if cell.mark in known and not (again and known[cell.mark].state != "measured"):
                continue
            console.print(f"{cell.number} of {len(cells)}: {shown_keys(cell.keys)}", soft_wrap=True)
            row = run_cell(cell, grid, directory / f"cell-{cell.number:03}")
            results.append(directory, row)
            _draw(directory, grid, cells)
            console.print(f"  {row.state.replace('_', ' ')} in {duration(row.took_s)}", soft_wrap=True)
    rows = list(results.read(directory, cells).values())
    Console(highlight=False, width=max(console.width, WIDTH)).print(results.table(rows))
    for line in (*filter(None, [results.agreement(rows)]), *results.not_measured(rows)):
        console.print(line, soft_wrap=True, markup=False)
    page = _draw(directory, grid, cells)
    console.print(f"{len(rows)} rows are in {directory / results.FILE}, drawn in {page}", soft_wrap=True)
    if best is not None:
        winner = results.write_best(rows, best)
        console.print(f"{best}: {shown_keys(winner.keys)}", soft_wrap=True)


def _draw(directory: Path, grid: Grid, cells: Sequence[Cell]) -> Path:
    """Write the page of what there is so far."""
    page = directory / "index.html"
    page.write_text(drawn(grid.name, grid.about, list(results.read(directory, cells).values()), len(cells)))
    return page
