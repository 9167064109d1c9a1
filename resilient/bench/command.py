"""`resilient bench`: the cells of a grid, one after the other; those that were run before are not run again."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from resilient.bench import results
from resilient.bench.grid import Cell, Grid, read, shown_keys
from resilient.bench.page import drawn
from resilient.bench.running import run_cell
from resilient.driver.display import duration
from resilient.exits import EnvironmentUnusable
from resilient.interruption import interruptible

RESULTS = Path("runs/bench")
LOCK = ".lock"  # in the directory of results
WIDTH = 200  # of the table, which a narrow terminal wraps: no number is cut off


def bench(file: Path, *, directory: Path | None, again: bool, best: Path | None) -> None:
    """Run what has not been run, and print the table.

    Args:
        directory: for results; None: `runs/bench/NAME`.
        again: cells that were not measured before are run once more.
        best: gets the keys of the fastest cell, as YAML.

    Raises:
        ForeseenError: the grid cannot be read, another command measures there, or somebody wants the end.
    """
    grid, cells = read(file)
    directory = directory or RESULTS / grid.name
    directory.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, markup=False, emoji=False)
    say = partial(console.print, soft_wrap=True)
    with _alone(directory), interruptible("the same command goes on with the cell that was running"):
        for cell in cells:
            known = results.read(directory, cells)
            if cell.mark in known and not (again and known[cell.mark].state != "measured"):
                continue
            say(f"{cell.number} of {len(cells)}: {shown_keys(cell.keys)}")
            row = run_cell(cell, grid, directory / f"cell-{cell.number:03}")
            results.append(directory, row)
            _draw(directory, grid, cells)
            say(f"  {row.state.replace('_', ' ')} in {duration(row.took_s)}")
    rows = list(results.read(directory, cells).values())
    Console(highlight=False, width=max(console.width, WIDTH)).print(results.table(rows))
    for line in (*filter(None, [results.agreement(rows)]), *results.not_measured(rows)):
        say(line)
    page = _draw(directory, grid, cells)
    say(f"{len(rows)} rows are in {directory / results.FILE}, drawn in {page}")
    if best is not None:
        winner = results.write_best(rows, best)
        say(f"{best}: {shown_keys(winner.keys)}")


def _draw(directory: Path, grid: Grid, cells: Sequence[Cell]) -> Path:
    """Write the page of what there is so far. Raises EnvironmentUnusable."""
    page = directory / "index.html"
    text = drawn(grid.name, grid.about, list(results.read(directory, cells).values()), len(cells))
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentUnusable(f"{page} cannot be written: {error.strerror}") from None
    return page


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The only command of this machine that measures there: another one would take the campaign in a cell for one left behind."""
    try:
        fd = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError:  # it is only read from: what is to be measured cannot be written there either
        fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentUnusable(f"another `resilient bench` measures in {directory}; name another --dir") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(fd)
