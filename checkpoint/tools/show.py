"""What the tools have found, as text and tables on stdout.

Owns how it looks.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from checkpoint.tools.listing import Entry

if TYPE_CHECKING:
    from rich.table import Table

    from checkpoint.tools.diff import ArrayDiff, Diff

_WIDE = 1000  # columns; what reads a pipe wants one line for each row
_VALUE_WIDTH = 40


def as_json(value: Any) -> None:
    """Print a value as JSON; numbers that JSON does not have are the strings inf and nan."""
    typer.echo(json.dumps(_finite(value), indent=1, ensure_ascii=False))


def entries(found: Sequence[Entry], *, with_verified: bool) -> None:
    """Print the table of `ckpt ls`."""
    titles = ("tier", "step", "generation", "MiB", "files", "age", "state", *(["verified"] if with_verified else []))
    table = _table(titles, left=("tier", "state", "verified"))
    for entry in found:
        size = "?" if entry.size_bytes is None else f"{entry.size_bytes / 2**20:.1f}"
        since = "?" if entry.age_s is None else age(entry.age_s)
        numbers = [str(entry.step), _known(entry.generation), size, _known(entry.files), since]
        verified = {None: "", True: "yes", False: "no"}[entry.verified]
        table.add_row(entry.tier or "", *numbers, _state(entry), *([verified] if with_verified else []))
    _print(table)


def diff(found: "Diff") -> None:
    """Print what `ckpt diff` has found: a line for each array that differs, and the rest in a sentence."""
    typer.echo(f"A: {found.a}\nB: {found.b}")
    unequal = [each for each in found.arrays if not each.bit_equal]
    if unequal:
        tolerant = any(each.beyond is not None for each in unequal)
        close = ("beyond", "close") if tolerant else ()
        table = _table(("array", "type", "differ", "share", *close, "max abs", "max rel", "NaN A", "NaN B"), left=("array", "type"))
        for each in unequal:
            table.add_row(*_cells(each, tolerant))
        _print(table)
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        for name in names:
            typer.echo(f"only in {side}: {name}")
    for key, (a, b) in found.state.items():
        typer.echo(f"state {key}: {_short(a)} in A, {_short(b)} in B")
    same = len(found.arrays) - len(unequal)
    typer.echo(f"{same} of {len(found.arrays)} arrays in both are equal bit by bit: " + ("equal" if found.equal else "they differ"))


def diff_as_json(found: "Diff") -> None:
    """Print the same as one JSON object."""
    from checkpoint.tools.diff import MISSING

    def value(each: Any) -> Any:
        return {} if each is MISSING else {"value": each}

    arrays = [
        {
            **asdict(each),
            "equal": each.equal,
            "bit_equal": each.bit_equal,
            "share": each.share,
            "elements": math.prod(each.shapes[0]),
        }
        for each in found.arrays
    ]
    state = {key: {"a": value(a), "b": value(b)} for key, (a, b) in found.state.items()}
    sides = {"a": str(found.a), "b": str(found.b), "equal": found.equal}
    as_json({**sides, "arrays": arrays, "only_a": found.only_a, "only_b": found.only_b, "state": state})


def age(seconds: float) -> str:
    """A time span in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _state(entry: Entry) -> str:
    link = "" if entry.link is None else f" (a link to {entry.link})"
    if entry.state == "part":
        return f"part of node {entry.node} of {entry.nodes}{link}"
    return f"damaged{link}: {entry.reason}" if entry.state == "damaged" else f"committed{link}"


def _cells(each: "ArrayDiff", tolerant: bool) -> list[str]:
    kind = each.dtypes[0] if each.dtypes[0] == each.dtypes[1] else " / ".join(each.dtypes)
    if each.shapes[0] != each.shapes[1]:
        shapes = " / ".join(str(list(shape)) for shape in each.shapes)
        return [each.name, f"{kind} {shapes}", *["-"] * (8 if tolerant else 6)]
    close = [str(each.beyond), "yes" if each.equal else "no"] if tolerant else []
    share = f"{100 * each.share:.3g}%"
    return [
        each.name,
        kind,
        str(each.differing),
        share,
        *close,
        f"{each.max_abs:.3g}",
        f"{each.max_rel:.3g}",
        str(each.nan_a),
        str(each.nan_b),
    ]


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 1]}…"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _table(titles: Sequence[str], left: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right")
    return table


def _print(table: "Table") -> None:
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE).print(table)
