"""The pages of benchmarks: what was found, as Markdown. Pure: results go in, text comes out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from figures import Figure, Result, Spread

HEAD = """# Benchmarks

This page is written by `python benchmarks/all.py` from the files in `benchmarks/results/`; do not edit it.

Each script measures the project and a peer by turns, in one run on one machine, because a machine is not as fast today as it was
yesterday. Compare ratios, not values of different machines or days. A ratio is the value divided by the peer's: of times, memory
and processor time, below 1 is better than the peer; of speeds (anything per second), above 1 is. Every cell is the median, with the
smallest and the largest in brackets; n is how often it was measured.
"""
COUNTED = ("", "steps", "files")  # units of what is counted
NOT_MEASURED = "not measured"
MARKERS = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A row of the README's comparison.

    Attributes:
        figures: name of the figure in the result of `benchmark`, by the peer of its column.
        alone: name of the figure of what has no peer.
        speed: it is one: what is told is the share of the peer's.
    """

    label: str
    benchmark: str
    figures: Mapping[str, str] = field(default_factory=dict)
    alone: str = ""
    speed: bool = False


COLUMNS = ("torchrun", "nvrx")
PEERS = {"torch": "torch", "nvidia-resiliency-ext": "NVRx"}  # by package: what stands beside resilient
ROWS = (
    Row("command → first finished step", "start", {"torchrun": "first_step/torchrun"}),
    Row("the command killed, run again → next finished step", "start", alone="driver_killed"),
    Row("`kill -9` of a worker → next finished step", "recovery", {"torchrun": "kill/torchrun", "nvrx": "kill/nvrx"}),
    Row("`kill -STOP` of a worker → next finished step", "recovery", {"torchrun": "stop/torchrun", "nvrx": "stop/nvrx"}),
    Row("training speed while nothing fails", "steady", {"torchrun": "tokens"}, speed=True),
)


def page(results: Sequence[Result], gpu: Result | None = None) -> str:
    """The whole page. Args: gpu: of one GPU, which is another machine."""
    parts = [HEAD]
    machines: list[Mapping[str, str]] = []
    for result in results:
        machines += [result.machine] if result.machine not in machines else []
    if not results:
        parts.append("Nothing was measured yet.\n")
    for number, machine in enumerate(machines, 1):
        told = "; ".join(f"{name}: {value}" for name, value in machine.items())
        parts.append(f"Machine{f' {number}' if len(machines) > 1 else ''}: {told}.\n")
    for result in results:
        name = f", machine {machines.index(result.machine) + 1}" if len(machines) > 1 else ""
        parts.append("\n".join(_section(result, name)))
    if gpu is not None:
        parts.append("\n".join(_one_gpu(gpu)))
    return "\n".join(parts)


def _section(result: Result, machine: str) -> Iterator[str]:
    yield f"## {result.benchmark}\n"
    if result.meaning:
        yield f"{result.meaning}\n"
    if result.error:
        yield f"**This benchmark did not end well:** {_cell(result.error)}\n"
    if result.figures:
        yield "| what | value | beside | its value | ratio | n |"
        yield "|---|---:|---|---:|---:|---:|"
        yield from (_row(each) for each in result.figures)
        yield ""
    script = "recovery" if result.benchmark == "leaks" else result.benchmark
    command = " ".join(["python", f"benchmarks/{script}.py", *result.arguments])
    yield f"`{command}`, commit {result.commit}, {result.date}{machine}; {_versions(result)}\n"


def _one_gpu(result: Result) -> Iterator[str]:
    yield "## One GPU\n"
    machine = "; ".join(f"{name}: {value}" for name, value in result.machine.items())
    yield f"{result.meaning} Another machine than those above: {machine}.\n"
    if result.error:
        yield f"**Not all of it was measured:** {_cell(result.error)}\n"
    yield "| what | value | beside | ratio | note |"
    yield "|---|---:|---|---:|---|"
    yield from (_row_of_gpu(each) for each in result.figures)
    yield ""
    yield f"`python benchmarks/gpu.py`, commit {result.commit}, {result.date}; {_versions(result)}\n"


def _row_of_gpu(figure: Figure) -> str:
    beside = "" if figure.peer_value is None else f"{figure.peer}: {_value(figure.peer_value, figure.unit)}"
    ratio = "" if figure.ratio is None else f"**{number(figure.ratio.median)}**"
    return f"| {_cell(figure.what)} | {_value(figure.value, figure.unit)} | {_cell(beside)} | {ratio} | {_cell(figure.note)} |"


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.versions.items())


def _row(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"**{number(figure.ratio.median)}**{_range(figure.ratio)}"
    peer = f"{figure.peer}: {figure.note}" if figure.note and figure.peer else figure.peer or figure.note
    theirs = "" if figure.peer_value is None else _value(figure.peer_value, figure.unit)
    cells = (_cell(figure.what), _value(figure.value, figure.unit), _cell(peer), theirs, ratio, str(figure.value.n))
    return f"| {' | '.join(cells)} |"


def _value(spread: Spread, unit: str) -> str:
    if unit in COUNTED and spread.median == int(spread.median):
        between = f" ({spread.low:g}–{spread.high:g})" if spread.n > 1 else ""
        return f"{spread.median:.0f}{between} {unit}".rstrip()
    return f"{number(spread.median)}{_range(spread)} {unit}".rstrip()


def _range(spread: Spread) -> str:
    return f" ({number(spread.low)}–{number(spread.high)})" if spread.n > 1 else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def number(value: float) -> str:
    """Three digits, as a person writes them."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:#.3g}" if abs(value) >= 0.01 else f"{value:.2g}"


# -- the README's table --------------------------------------------------------------------------------------------------


def comparison(results: Sequence[Result]) -> str:
    """The table of the README; what was not measured says so."""
    by_name = {result.benchmark: {figure.name: figure for figure in result.figures} for result in results}
    used = [result for result in results if result.benchmark in {row.benchmark for row in ROWS}]
    lines = ["| | resilient | torchrun | NVRx's launcher |", "|---|---|---|---|"]
    for row in ROWS:
        found = by_name.get(row.benchmark, {})
        figures = {peer: found[name] for peer, name in row.figures.items() if name in found}
        ours = next(iter(figures.values()), found.get(row.alone))
        cells = [row.label, NOT_MEASURED if ours is None else _ours(ours, row.speed)]
        cells += [_theirs(figures.get(peer), row, peer) for peer in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    if used:
        newest = max(used, key=lambda result: result.date)
        where = f"{newest.machine.get('cores', '?')} cores, {newest.machine.get('processor', '?')}"
        commits = list(dict.fromkeys(result.commit for result in sorted(used, key=lambda result: result.date)))
        ours = f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}"
        named = {f"{name} {result.versions[key]}": None for key, name in PEERS.items() for result in used if key in result.versions}
        with_versions = f" with {', '.join(named)}" if named else ""
        lines += ["", f"Medians, measured in turns on one machine{with_versions} ({where}; {newest.date[:10]}, {ours})."]
    return "\n".join(lines)


def _ours(figure: Figure, speed: bool) -> str:
    if speed:
        return NOT_MEASURED if figure.ratio is None else f"{number(figure.ratio.median)}×"
    return f"{number(figure.value.median)} {figure.unit}"


def _theirs(figure: Figure | None, row: Row, peer: str) -> str:
    if figure is None:
        return NOT_MEASURED if peer in row.figures else "–"
    if row.speed:
        return "1×"
    if figure.peer_value is None or figure.ratio is None:
        return "never" if figure.note else NOT_MEASURED
    return f"{number(figure.peer_value.median)} {figure.unit} ({number(1 / figure.ratio.median)}×)"


def put(text: str, table: str) -> str:
    """The README with this table. Raises ValueError if it has no place for one."""
    if len(MARKERS.findall(text)) != 1:
        raise ValueError("README.md needs one <!-- figures --> ... <!-- end -->")
    return MARKERS.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)
