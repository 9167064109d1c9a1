"""`resilient plan --suggest`: the layouts of a config's ranks, the fastest first."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from resilient.bench import results
from resilient.campaign import machine_layout
from resilient.config import Config, Layout
from resilient.decided import decided
from resilient.exits import Exit, ForeseenError
from resilient.health.report import size
from resilient.steptime.asking import asked, crowding
from resilient.steptime.candidates import Candidate, ordered
from resilient.steptime.rates import STATED, Rates, Sample, fitted
from resilient.steptime.work import RankWork

WIDTH = 110  # of the table, which a narrow terminal wraps: nothing is cut off


class NoRates(ForeseenError):
    """Nothing says how fast anything is."""

    code = Exit.CONFIG


def suggest(config: Config, results_file: Path | None, stated: Sequence[str]) -> None:
    """Print the layouts.

    Args:
        config: with what it leaves open, which is decided for each layout by itself.
        results_file: of a bench, or the directory that it is in.
        stated: `NAME=VALUE`, which win over what a bench has found.

    Raises:
        NoRates: neither says how fast work is done, or they cannot be read.
        ConfigError: the config is not possible as it is.
    """
    samples = [] if results_file is None else _samples(results_file)
    rates = _rates(samples, _stated(stated))
    if not _work(config, machine_layout(config)):
        raise NoRates(f"the module of {config.entrypoint} has no function rank_work, so that its layouts cannot be told apart")
    found = ordered(config, machine_layout, _work, crowding, rates)
    console = Console(highlight=False, markup=False, emoji=False)
    Console(highlight=False, width=max(console.width, WIDTH)).print(_table(found))
    sources = [f"fitted to {len(samples)} rows of {results_file}"] * bool(samples) + ["stated"] * bool(stated)
    console.print(f"rates, {' and '.join(sources)}: {described(rates)}", soft_wrap=True)


def _work(config: Config, layout: Layout) -> Sequence[RankWork]:
    """What its ranks would do."""
    return asked(decided(config)[0], layout)


def _samples(file: Path) -> list[Sample]:
    path = file / results.FILE if file.is_dir() else file
    if not path.is_file():
        raise NoRates(f"{path}: there is no such file or directory; `resilient bench GRID.yaml` writes one")
    found = list(results.samples_of(list(results.every(path).values())).values())
    if not found:
        raise NoRates(f"{path}: no row has a measured step with its work")
    return found


def _stated(words: Sequence[str]) -> Mapping[str, float]:
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise NoRates(f"--rate {word}: must be NAME=NUMBER, as flops_per_s=4e14") from None
    return found


def _rates(samples: Sequence[Sample], stated: Mapping[str, float]) -> Rates:
    if not samples and "flops_per_s" not in stated:
        names = ", ".join(STATED)
        raise NoRates(f"--suggest needs --results of a bench, or --rate flops_per_s=NUMBER and further ones of {names}")
    try:
        return Rates.stated(stated, fitted(samples) if samples else None)
    except ValueError as error:
        raise NoRates(f"--rate: {error}") from None


def described(rates: Rates) -> str:
    """In words, in the form in which they can be stated."""
    found = []
    for name, kind in STATED.items():
        cost = rates.seconds[kind]
        found.append(f"{name}={(1 / cost if name.endswith('_per_s') else cost):.3g}" if cost else f"{name}: costs nothing")
    return ", ".join(found)


def _table(found: Sequence[Candidate]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = ("tp", "cp", "pp", "dp", "micro batches", "step", "tokens/s", "bubble", "memory of a rank")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in found:
        spread = each.layout
        sizes = (spread.tp, spread.cp, spread.pp, spread.dp, spread.accumulation)
        words = (_seconds(each.step_s), f"{each.tokens_per_s:,.0f}", f"{each.bubble:.0%}", size(each.memory_bytes))
        table.add_row(*map(str, sizes), *words, _note(each))
    return table


def _note(candidate: Candidate) -> str:
    """What stands against it."""
    if not candidate.fits:
        return "does not fit"
    return "on GPUs only" if candidate.layout.cp > 1 else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
