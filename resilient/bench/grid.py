"""A grid: a base config, axes of keys with their values, and further cells; from its file to a list of cells."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from resilient.config import document
from resilient.config.document import NotADocument
from resilient.config.errors import ConfigError
from resilient.config.sinks import SINKS
from resilient.config.source import MOST, REPORTED, in_words, ordered, parse, reported
from resilient.exits import Exit, ForeseenError

MOST_CELLS = 10_000

# What would disturb the measurement, or is meant for another number of steps, is off; a grid that wants it says so.
_MEASURING: Mapping[str, Any] = {
    "train": {"eval_interval": 0, "eval_iters": 1},
    "optimizer": {
        "schedule": "constant", "warmup_samples": 0, "warmup_tokens": None, "decay_samples": "auto", "decay_tokens": None
    },
    "checkpoint": {"every_steps": 1_000_000, "memory_cost": 0.0, "tiers": [{"name": "durable", "path": "${run_dir}/checkpoints"}]},
    "logging": {"tensorboard": False, "sinks": dict.fromkeys(SINKS)},
}  # fmt: skip

Key = Annotated[str, Field(pattern=r"^[a-z_]+(\.[a-z_0-9]+)*$")]
Values = Mapping[str, Any]


class GridError(ForeseenError):
    """A grid that cannot be: file, key, what is allowed."""

    code = Exit.CONFIG


class Grid(BaseModel):
    """What is tried. A cell is one value of each axis; `cells` are added as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(description="of the directory of results")
    about: str = Field("", description="one line for people")
    file: Path | None = Field(None, description="a config that all cells begin with, seen from the grid's file")
    config: dict[str, Any] = Field({}, description="keys of the config for all cells, which win over the file's")
    axes: dict[Key, Annotated[list[Any], Field(min_length=1)]] = Field(
        {}, description="dotted keys of the config and what they take"
    )
    cells: list[dict[Key, Any]] = Field([], description="further cells")
    warmup_steps: Annotated[int, Field(ge=1)] = Field(5, description="at the beginning of each cell that do not count")
    steps: Annotated[int, Field(ge=2)] = Field(20, description="that do")
    limit_s: Annotated[float, Field(gt=0)] = Field(600.0, description="for a cell, its start included")


@dataclass(frozen=True)
class Cell:
    """One of the campaigns.

    Attributes:
        keys: what makes it another one than the others, by dotted key.
        config: the whole config, but for its name and run directory.
        mark: of all that determines it: results of a cell that has changed do not count.
    """

    number: int
    keys: Values
    config: Values
    mark: str


def read(path: Path) -> tuple[Grid, list[Cell]]:
    """A grid and its cells, from its file. Raises GridError."""
    try:
        source = parse(path, "a grid")
    except ConfigError as error:
        raise GridError(str(error)) from None
    try:
        grid = Grid.model_validate(source.values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [in_words(source, dict(each), Grid) for each in found[: MOST * REPORTED]]
        raise GridError("\n".join(map(str, reported(ordered(problems))))) from None
    base: Values = {}
    if grid.file is not None:
        base = _document(path.parent / grid.file)
        if not isinstance(base, dict):
            raise GridError(f"{path}: file: {grid.file}: a config is a mapping of keys to values")
    total = sum(1 for _ in itertools.islice(_keys(grid), MOST_CELLS + 1))
    if total > MOST_CELLS:
        raise GridError(f"{path}: the grid has more than {MOST_CELLS:,} cells, which is all that is allowed")
    return grid, [_cell(number, keys, grid, base) for number, keys in enumerate(_keys(grid), 1)]


def _document(path: Path) -> Any:
    try:
        return document.read(path)
    except NotADocument as error:
        raise GridError(f"{path}{'' if error.line is None else f':{error.line}'}: {error.message}") from None


def _keys(grid: Grid) -> Iterator[Values]:
    """Those of each cell, each once."""
    seen = set()
    product = (dict(zip(grid.axes, values, strict=True)) for values in itertools.product(*grid.axes.values()) if grid.axes)
    for keys in itertools.chain(product, grid.cells or ([{}] if not grid.axes else [])):
        mark = json.dumps(keys, sort_keys=True, default=str)
        if mark not in seen:
            seen.add(mark)
            yield keys


def _cell(number: int, keys: Values, grid: Grid, base: Values) -> Cell:
    length = {
        "train": {"steps": grid.warmup_steps + grid.steps, "samples": None, "batch_rampup": None},
        "logging": {"inspect_step": grid.warmup_steps},
    }
    config = merged(merged(merged(merged(base, _MEASURING), grid.config), length), nested(keys))
    text = json.dumps([config, grid.warmup_steps, grid.steps], sort_keys=True, default=str)
    return Cell(number, keys, config, hashlib.sha256(text.encode()).hexdigest()[:16])


def nested(keys: Values) -> dict[str, Any]:
    """Dotted keys as the mappings that a config is made of; of two that say otherwise of the same, the second one wins."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        found = merged(found, value)
    return found


def merged(below: Values, above: Values) -> dict[str, Any]:
    """Two mappings, of which the second one wins; mappings inside of both are merged in the same way."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def shown_keys(keys: Values) -> str:
    """The keys of a cell in a line, without their sections."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in keys.items()) or "as it is"
