"""How the losses of two campaigns differ. Pure: steps and losses in, numbers out."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Losses:
    """Of the steps that both have; of a step that was computed again, the last time counts.

    Attributes:
        common: steps.
        first, last: of them; None where there is none.
        first_different: the first step whose losses are not the same number; None where all are.
        different: steps of which that is so.
        largest: step, and the two losses, where they are farthest apart.
        rows: step and losses, evenly spaced, with the first and the last one and the first that is different.
    """

    common: int
    first: int | None
    last: int | None
    first_different: int | None
    different: int
    largest: tuple[int, float, float] | None
    rows: tuple[tuple[int, float, float], ...]


def losses_of(lines: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Loss by step, of lines of metrics; NaN where it was not finite, which is null in a line."""
    told = (line for line in lines if isinstance(line.get("step"), int) and "loss" in line and line.get("skipped") != "rolled_back")
    return {line["step"]: math.nan if line["loss"] is None else float(line["loss"]) for line in told}


def compared(a: Mapping[int, float], b: Mapping[int, float], rows: int) -> Losses:
    """Args: rows: about so many of the steps are shown."""
    common = sorted(a.keys() & b.keys())
    if not common:
        return Losses(0, None, None, None, 0, None, ())
    different = [step for step in common if not _same(a[step], b[step])]
    stride = max(1, -(-len(common) // max(1, rows)))
    shown = sorted({*common[::stride], common[-1], *different[:1]})
    largest = max(different, key=lambda step: _apart(a[step], b[step]), default=None)
    return Losses(
        common=len(common),
        first=common[0],
        last=common[-1],
        first_different=different[0] if different else None,
        different=len(different),
        largest=None if largest is None else (largest, a[largest], b[largest]),
        rows=tuple((step, a[step], b[step]) for step in shown),
    )


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def _apart(one: float, other: float) -> float:
    distance = abs(one - other)
    return distance if distance == distance else float("inf")
