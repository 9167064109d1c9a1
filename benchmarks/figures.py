"""What a benchmark has found, as one JSON file: typed figures, and where and when they were measured.

A script of this folder needs three calls:

    args = figures.arguments(parser)                                       # with --json FILE
    found = [figures.figure("kill", "kill -9 of a worker to the next finished step", "s", ours, "torchrun", theirs)]
    figures.save(args.json, "What a dead worker costs.", found)            # does nothing where --json was not given

`all.py` makes the pages of these files. A ratio is always the value divided by the peer's, whatever the unit: of times, below 1 is
faster than the peer; of rates, above 1 is. Nothing here imports the project, so that it can be imported before a path is set up.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VERSION = 1  # of the files
PACKAGES = ("resilient", "torch", "numpy", "zarr")


@dataclass(frozen=True)
class Spread:
    """Of values that were measured: the median, the smallest, the largest, and how many there are."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Raises ValueError if there are none."""
        if not values:
            raise ValueError("no value was measured")
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, beside a peer where there is one.

    Attributes:
        name: stable and unique in its script, as pages ask for it: "kill", "kill/nvrx".
        what: in words; the row of a table.
        unit: of `value` and `peer_value`, as in "s", "tokens/s", "%", "files"; empty for a plain number.
        peer: what was measured beside it, in the same run; empty for nothing.
        ratio: value / peer's value; None where there is no peer, or where the peer never gets there.
        note: what else a reader must know of this one.
    """

    name: str
    what: str
    unit: str
    value: Spread
    peer: str = ""
    peer_value: Spread | None = None
    ratio: Spread | None = None
    note: str = ""


@dataclass(frozen=True)
class Result:
    """What one script has found.

    Attributes:
        benchmark: the script's name without its ending.
        meaning: one sentence: what the figures say to a user.
        error: why there are none, or not all; empty if all went well.
        arguments: that the script was given.
        date: UTC, ISO 8601.
        machine: cores, processor, memory, kernel and so on, in words.
    """

    benchmark: str
    meaning: str
    figures: Sequence[Figure]
    arguments: Sequence[str] = ()
    commit: str = ""
    date: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


def figure(
    name: str,
    what: str,
    unit: str,
    values: Sequence[float],
    peer: str = "",
    peer_values: Sequence[float] = (),
    *,
    paired: bool = False,
    note: str = "",
) -> Figure:
    """A figure of the values themselves. Raises ValueError if there are none.

    Args:
        peer_values: of the peer; empty where it never gets there, which `note` should say.
        paired: value i and the peer's value i were measured in the same round: the ratio's spread is that of the rounds' ratios.
            Otherwise it is that of all values to the peer's median, and its median is the ratio of the medians.
    """
    if not peer_values:
        return Figure(name, what, unit, Spread.of(values), peer, note=note)
    ours, theirs = Spread.of(values), Spread.of(peer_values)
    if paired:
        ratio = Spread.of([one / other for one, other in zip(values, peer_values, strict=True)])
    else:
        ratio = Spread.of([each / theirs.median for each in values])
    return Figure(name, what, unit, ours, peer, theirs, ratio, note)


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the script was given, with the option of all scripts: `json` is a path, or None. See `end_by_exit`, too."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, for benchmarks/all.py")
    args = parser.parse_args()
    end_by_exit()
    return args


def end_by_exit() -> None:
    """From here on SIGTERM ends the script as Ctrl-C does: through all that ends what it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def save(
    path: Path | None,
    meaning: str,
    found: Sequence[Figure],
    *,
    benchmark: str | None = None,
    versions: Mapping[str, str] | None = None,
    error: str = "",
) -> None:
    """Write what the running script has found; nothing where `path` is None.

    Args:
        benchmark: where it is not the script's name.
        error: what went wrong, where the figures are not all that they should be.
        versions: of peers that are installed elsewhere.
    """
    if path is None:
        return
    arguments = [*sys.argv[1:]]
    if "--json" in arguments:
        at = arguments.index("--json")
        del arguments[at : at + 2]
    # Where things are installed is nobody's business.
    shown = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    write(path, measured(benchmark or Path(sys.argv[0]).stem, meaning, found, shown, versions or {}, error))


def measured(
    benchmark: str, meaning: str, found: Sequence[Figure], arguments: Sequence[str], versions: Mapping[str, str], error: str = ""
) -> Result:
    """A result of here and now."""
    names = [each.name for each in found]
    if len(set(names)) < len(names):
        raise ValueError(f"two figures of {benchmark} have the same name: {sorted(names)}")
    return Result(
        benchmark=benchmark,
        meaning=meaning,
        figures=tuple(found),
        arguments=tuple(arguments),
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions={"python": platform.python_version(), **_installed(), **versions},
        error=error,
    )


def with_error(result: Result, error: str) -> Result:
    """The result, with what went wrong."""
    return replace(result, error=error)


def write(path: Path, result: Result) -> None:
    """In one piece, so that a script that dies leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"version": VERSION, **_rounded(asdict(result))}, indent=1) + "\n")
    new.replace(path)


def read(path: Path) -> Result:
    """Raises ValueError if it is no file of this version."""
    fields = json.loads(path.read_text())
    if fields.pop("version", None) != VERSION:
        raise ValueError(f"{path} is not of version {VERSION} of benchmarks/figures.py: run the benchmark again")
    lists = {"figures": tuple(map(_figure, fields["figures"])), "arguments": tuple(fields["arguments"])}
    return Result(**{**fields, **lists})


def _figure(fields: Mapping[str, Any]) -> Figure:
    spreads = {name: Spread(**fields[name]) for name in ("value", "peer_value", "ratio") if fields[name] is not None}
    return Figure(**{**fields, **spreads})


def _rounded(value: Any) -> Any:
    """Six digits are more than was ever measured, and keep the files' differences short."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


# -- where and when ------------------------------------------------------------------------------------------------------


def commit() -> str:
    """Of the checkout that is measured; with a plus where files that are tracked differ from it, "unknown" outside of one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!benchmarks/results", ":!README.md")
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, str]:
    """What can be said of this machine without naming it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": _processor(),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
    }


def _processor() -> str:
    """The model, and the units for bf16 that it has, as /proc/cpuinfo tells."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    fields = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in text.splitlines())]))
    units = [unit for unit in ("avx512f", "avx512_bf16", "amx_bf16") if unit in fields.get("flags", "").split()]
    return f"{fields.get('model name', 'unknown')} ({', '.join(units) or 'no AVX-512'})"


def _installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
