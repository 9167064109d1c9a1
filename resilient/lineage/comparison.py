"""`resilient diff`: how two campaigns differ, in config, identity and losses. Reads both run directories and changes nothing."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilient import ledger
from resilient.config import Config, load
from resilient.config.errors import shown_change
from resilient.driver.display import harmless
from resilient.identity import record
from resilient.identity.classes import CLASSES
from resilient.identity.comparison import Change, compare
from resilient.identity.fingerprint import Fingerprint, Lineage, at, keys_of
from resilient.json_output import print_json
from resilient.lineage.difference import Losses, compared, losses_of
from resilient.processes import must_be_run_directory

ROWS = 12
JSON_ROWS = 1000


@dataclass(frozen=True)
class Comparison:
    """Two campaigns.

    Attributes:
        identity: what determines the numbers: keys, contents of files, versions; with the class of each.
        free: other keys of the config.
    """

    identity: tuple[Change, ...]
    free: tuple[Change, ...]
    lineage: tuple[Lineage | None, Lineage | None]
    losses: Losses


def between(a: Path, b: Path, rows: int) -> Comparison:
    """Compare two run directories.

    Raises:
        EnvironmentUnusable: one is none.
        ConfigError: the config of one is not one of this version.
    """
    for run_dir in (a, b):
        must_be_run_directory(run_dir)
    one, other = (load(run_dir / "config.yaml") for run_dir in (a, b))
    old, new = _fingerprint(a, one), _fingerprint(b, other)
    losses = [losses_of(ledger.read_metrics(run_dir / ledger.METRICS)) for run_dir in (a, b)]
    return Comparison(
        identity=(*compare(old, new), *_prepared(old, new)),
        free=tuple(_free(one, other)),
        lineage=(old.lineage, new.lineage),
        losses=compared(losses[0], losses[1], rows),
    )


def show(a: Path, b: Path, *, as_json: bool) -> None:
    """Print it."""
    found = between(a, b, JSON_ROWS if as_json else ROWS)
    if as_json:
        print_json(as_plain(a, b, found))
        return
    console = Console(highlight=False)
    for text in render(a, b, found):
        console.print(text)


def as_plain(a: Path, b: Path, found: Comparison) -> dict[str, Any]:
    """As JSON."""

    def changes(of: tuple[Change, ...]) -> list[dict[str, Any]]:
        return [{"key": each.key, "class": each.kind, "a": each.old, "b": each.new} for each in of]

    return {
        "a": str(a),
        "b": str(b),
        "identity": changes(found.identity),
        "config": changes(found.free),
        "lineage": {name: msgspec.to_builtins(each) for name, each in zip("ab", found.lineage, strict=True)},
        "losses": asdict(found.losses),
    }


def render(a: Path, b: Path, found: Comparison) -> Iterator[Table | Text]:
    """For a terminal."""
    yield Text(f"a: {a}{_branch(found.lineage[0])}")
    yield Text(f"b: {b}{_branch(found.lineage[1])}")
    yield Text("")
    if found.identity:
        yield _table("what determines the numbers", found.identity, with_class=True)
    else:
        yield Text("what determines the numbers is the same")
    if found.free:
        yield Text("")
        yield _table("other keys", found.free, with_class=False)
    yield Text("")
    yield from _losses(found.losses)


def _losses(losses: Losses) -> Iterator[Table | Text]:
    if not losses.common:
        yield Text("there is no step of which both have a loss")
        return
    steps = f"{losses.common} common step{'s' * (losses.common > 1)}, {losses.first} to {losses.last}"
    if losses.largest is None:
        yield Text(f"losses of {steps}: the same to the bit")
    else:
        step, one, other = losses.largest
        yield Text(
            f"losses of {steps}: {losses.different} differ, from step {losses.first_different} on; "
            f"most at step {step}, by {abs(one - other):.3g}"
        )
    table = Table("step", "loss of a", "loss of b", "b - a", box=None, pad_edge=False)
    for step, one, other in losses.rows:
        table.add_row(str(step), repr(one), repr(other), "" if one == other else f"{other - one:+.3g}")
    yield table


def _table(title: str, changes: tuple[Change, ...], *, with_class: bool) -> Table:
    table = Table(
        "key", *(["at a resume"] if with_class else []), "a", "b", title=title, title_justify="left", box=None, pad_edge=False
    )
    for each in changes:
        cells = (harmless(each.key), *([each.kind] if with_class else []), *shown_change(each.old, each.new))
        table.add_row(*map(Text, cells))  # not markup
    return table


def _branch(lineage: Lineage | None) -> str:
    return "" if lineage is None else f", branched off {harmless(lineage.parent)} at step {lineage.step}"


def _fingerprint(run_dir: Path, config: Config) -> Fingerprint:
    found = record.read(run_dir)
    return found if found is not None else Fingerprint(keys=keys_of(config, None), contents=record.contents(config))


def _prepared(a: Fingerprint, b: Fingerprint) -> Iterator[Change]:
    old, new = a.prepared or {}, b.prepared or {}
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            yield Change(name, old[name].sampled_sha256[:8], new[name].sampled_sha256[:8], "refused")


def _free(a: Config, b: Config) -> Iterator[Change]:
    one, other = a.model_dump(mode="json"), b.model_dump(mode="json")
    for key, kind in CLASSES.items():
        if kind == "free":
            yield from _different(key, at(one, key), at(other, key))


def _different(key: str, one: Any, other: Any) -> Iterator[Change]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*one, *other)):
            yield from _different(f"{key}.{name}", one.get(name), other.get(name))
    elif one != other:
        yield Change(key, one, other, "free")
