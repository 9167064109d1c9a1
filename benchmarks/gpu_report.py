"""What gpu.py has found: figures, the two files beside the journal, and the result of which `all.py` makes a section."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import figures

MEASURED, DRY = "measured", "dry run"
MEANING = (
    "How fast the trainer is on a GPU beside a plain script, what snapshots and killed ranks cost there, and whether what holds "
    "on CPUs holds there."
)


@dataclass(frozen=True)
class Figure:
    """One number.

    Attributes:
        name: unique in its case.
        value: the median of `measured`, where that holds more than one.
        gpu: a GPU has seen it.
        peer: what it is compared with: another figure, as `case/name`; or in words, where `peer_value` says how much that is.
    """

    name: str
    unit: str
    value: float
    gpu: bool
    note: str = ""
    peer: str = ""
    peer_value: float | None = None
    measured: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a case: figures, or why there are none; one that failed is tried again."""

    case: str
    figures: tuple[Figure, ...] = ()
    left_out: str = ""
    error: str = ""
    took_s: float = 0.0


def results(about: Mapping[str, Any], outcomes: Iterable[Outcome], not_reached: Sequence[str] = ()) -> dict[str, Any]:
    """What gpu.json holds. Args: not_reached: cases for which no time was left."""
    outcomes = list(outcomes)
    values = {f"{each.case}/{figure.name}": figure.value for each in outcomes for figure in each.figures}
    found = []
    for each in outcomes:
        for figure in each.figures:
            peer_value = values.get(figure.peer) if figure.peer_value is None else figure.peer_value
            ratio = figure.value / peer_value if peer_value else None
            found.append({"case": each.case, **asdict(figure), "peer_value": peer_value, "ratio": ratio})
    return {
        **about,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": figures.machine(),
        "figures": found,
        "took_s": {each.case: each.took_s for each in outcomes},
        "left_out": {each.case: each.left_out for each in outcomes if each.left_out},
        "errors": {each.case: each.error for each in outcomes if each.error},
        "not_reached": [*not_reached],
    }


def table(result: Mapping[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"# {result['mode']} on {result['device']}, commit {result['commit']}, {result['date']}",
        "",
        "| case | what | value | seen by a GPU | beside | ratio | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in result["figures"]:
        seen, beside, ratio = "yes" if each["gpu"] else "no", "", ""
        if each["ratio"] is not None:
            beside, ratio = f"{each['peer']}: {_amount(each['peer_value'], each['unit'])}", f"{each['ratio']:.3g}"
        cells = (each["case"], each["name"], _amount(each["value"], each["unit"]), seen, beside, ratio, each["note"])
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {case} | left out | | no | | | {why} |" for case, why in result["left_out"].items()]
    lines += [f"| {case} | FAILED | | no | | | {_last_line(why)} |" for case, why in result["errors"].items()]
    lines += [f"| {case} | not reached | | no | | | no time was left |" for case in result["not_reached"]]
    return "\n".join(lines) + "\n"


def for_the_page(result: Mapping[str, Any]) -> figures.Result:
    """What `benchmarks/results/gpu.json` holds, of what gpu.json does.

    Raises:
        ValueError: it is of a dry run, or of no GPU, and nothing to be shown.
    """
    if result["mode"] != MEASURED or not all(each["gpu"] for each in result["figures"]):
        raise ValueError(f"it is of a {result['mode']} on {result['device']}: only figures that a GPU has seen are kept")
    versions = result["versions"]
    wrong = [f"{case}: {_last_line(why)}" for case, why in result["errors"].items()]
    wrong += [f"{case}: no time was left" for case in result["not_reached"]]
    return figures.Result(
        benchmark="gpu",
        meaning=MEANING,
        figures=tuple(map(_for_the_page, result["figures"])),
        commit=result["commit"],
        date=result["date"],
        machine={"GPU": result["device"], **result["machine"]},
        versions=versions,
        error="; ".join(wrong),
    )


def _for_the_page(each: Mapping[str, Any]) -> figures.Figure:
    name = f"{each['case']}/{each['name']}"
    values, peer_value, peer = each["measured"] or [each["value"]], each["peer_value"], each["peer"]
    if peer_value is None:
        return figures.figure(name, f"{each['case']}: {each['name']}", each["unit"], values, note=each["note"])
    case, _, what = peer.partition("/")
    shown = case if what == each["name"] else peer.replace("/", ": ")
    return figures.figure(name, f"{each['case']}: {each['name']}", each["unit"], values, shown, [peer_value], note=each["note"])


def _amount(value: float, unit: str) -> str:
    return f"{value:,.4g} {unit}".rstrip()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
