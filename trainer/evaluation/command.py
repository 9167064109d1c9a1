"""`trainer evaluate`: one checkpoint, or each of a campaign, also while it runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress

import checkpoint
from checkpoint.naming import step_of
from resilient.worker import Config, ConfigError, load_config
from trainer.data.errors import DataError, MissingError, StorageError
from trainer.data.samples import Split
from trainer.evaluation.measure import Evaluation, Tally, evaluate, texts
from trainer.evaluation.records import Records, as_line
from trainer.evaluation.sizes import sizes_of
from trainer.restore import RestoreError, find, restore, root_of

BAD_INPUT, UNUSABLE = 78, 69
LOOK_S = 5.0  # between two looks for new checkpoints


class Refused(Exception):
    """Ends the command with a message and an exit code."""

    def __init__(self, message: str, code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Options:
    """How to evaluate; see the command line.

    Attributes:
        data: prefixes; none: `split` of the campaign's own data.
        samples: of each; None: as many as there are, or as the campaign validates on.
    """

    data: tuple[Path, ...]
    split: Split
    samples: int | None
    batch_size: int | None
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["trained", "bf16", "fp32"]
    tokenizer: Path | None

    @property
    def text(self) -> str:
        """What it is evaluated on, in a word: evaluations on the same are not repeated."""
        what = ",".join(str(prefix) for prefix in self.data) or self.split
        return what if self.samples is None else f"{what}:{self.samples}"


def evaluate_one(path: Path, options: Options, *, as_json: bool) -> None:
    """Evaluate the checkpoint that a path means, and print what was found. Raises Refused."""
    try:
        chosen = find(path)
        found = _evaluated(chosen, options, path)
    except RestoreError as error:
        raise Refused(str(error), UNUSABLE) from error
    _print(_record(chosen, options, found), found, as_json)


def evaluate_campaign(path: Path, options: Options, *, every: int, follow: bool, as_json: bool) -> None:
    """Evaluate each checkpoint of a run directory whose step is a multiple of `every`, unless that was done before; keep and print
    what was found. One that is damaged is told and passed by.

    Args:
        follow: go on with those that come, until that of the campaign's last step, which is evaluated whatever its number is.

    Raises:
        Refused: this is no run directory, something cannot be read or written, or a checkpoint was damaged.
    """
    if not path.is_dir() or step_of(path) is not None:
        code = BAD_INPUT if path.is_dir() else UNUSABLE
        raise Refused(f"{path} is no run directory; one checkpoint is evaluated without --every and --follow", code)
    records, damaged = Records(path), set[int]()
    try:
        done = records.steps(options.text)
        while True:
            last = _last(path) if follow else None  # before the look, so that nothing comes between
            for step in _due(path, every, done, last):
                done.add(step)
                chosen = checkpoint.step_path(path, step)
                try:
                    chosen = checkpoint.step_path(_root(path), step)
                    found = _evaluated(chosen, options, path)
                except RestoreError as error:
                    if chosen.is_dir():  # else it was deleted meanwhile, as older ones are
                        damaged.add(step)
                        typer.echo(str(error), err=True)
                    continue
                record = _record(chosen, options, found)
                records.add(record)
                records.plot(step, _scalars(found))
                _print(record, found, as_json)
            if last is not None or not follow:
                break
            time.sleep(LOOK_S)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}", UNUSABLE) from error
    except RestoreError as error:
        raise Refused(str(error), UNUSABLE) from error
    if damaged:
        raise Refused(f"{len(damaged)} checkpoints could not be evaluated: steps {', '.join(map(str, sorted(damaged)))}", UNUSABLE)
    if not done:
        raise Refused(f"{path} has no checkpoint of a step that is a multiple of {every}", UNUSABLE)


def _due(path: Path, every: int, done: set[int], last: int | None) -> list[int]:
    root = root_of(path)
    there = checkpoint.steps(root) if root is not None else []
    return [step for step in there if (step % every == 0 or step == last) and step not in done]


def _root(path: Path) -> Path:
    root = root_of(path)
    if root is None:
        raise RestoreError(f"{path} has no checkpoint any more")
    return root


def _last(path: Path) -> int | None:
    """The last step that the campaign is to reach, or the one beyond that it has; None: it has no checkpoint yet."""
    root = root_of(path)
    found = checkpoint.steps(root) if root is not None else []
    if root is None or not found:
        return None
    try:
        config = _config(path, checkpoint.step_path(root, found[-1]))
    except (checkpoint.CheckpointError, KeyError, ValidationError):
        return None  # deleted meanwhile, or damaged: whoever evaluates it says so
    return found[-1] if found[-1] >= config.train.steps else None


def _config(path: Path, newest: Path) -> Config:
    """The campaign's: that of its run directory, which is of its newest job, or else, as for a tier by itself, of the checkpoint.

    Raises CheckpointError, KeyError, ValidationError.
    """
    written = path / "config.yaml"
    if written.is_file():
        with suppress(ConfigError):
            return load_config(written)
    return Config.model_validate(checkpoint.read_state(newest)["config"])


def _evaluated(path: Path, options: Options, named: Path) -> Evaluation:
    """Args: named: the path that the checkpoint was found by. Raises Refused, RestoreError."""
    device = _device(options.device)
    try:
        model, config = restore(path, device, options.precision, named=named)
        parts = texts(config, model.shape.vocab, options.data, options.split, options.samples)
        sizes = sizes_of(config, options.tokenizer, model.shape.vocab)
        with _shown(path.name) as progress:
            rows = options.batch_size or config.train.micro_batch_size
            return evaluate(model, config, parts, rows=rows, sizes=sizes, progress=progress)
    except StorageError as error:
        raise Refused(str(error), UNUSABLE) from error
    except MissingError as error:
        asked_for = options.data or (options.tokenizer is not None and not options.tokenizer.exists())
        raise Refused(str(error), BAD_INPUT if asked_for else UNUSABLE) from error  # the campaign's own was there
    except (DataError, ConfigError) as error:
        raise Refused(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise Refused(f"{device} has too little memory ({error}); try a smaller --batch-size", UNUSABLE) from error


def _device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise Refused("--device cuda: torch sees no GPU here; allowed: auto, cpu")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def _record(path: Path, options: Options, found: Evaluation) -> dict[str, Any]:
    corpora = {name: tally.figures() for name, tally in found.corpora.items()}
    known = {"step": step_of(path), "t": time.time(), "text": options.text}
    return {**known, **found.whole.figures(), "corpora": corpora}


def _scalars(found: Evaluation) -> dict[str, float]:
    tallies = {"": found.whole, **({f"{name}/": tally for name, tally in found.corpora.items()} if len(found.corpora) > 1 else {})}
    return {
        f"evaluation/{where}{name}": value
        for where, tally in tallies.items()
        for name, value in tally.figures().items()
        if name != "tokens" and value is not None
    }


def _print(record: dict[str, Any], found: Evaluation, as_json: bool) -> None:
    if as_json:
        typer.echo(as_line(record))
        return
    typer.echo(f"step {record['step']}, {record['text']}: {_sentence(found.whole)}")
    if len(found.corpora) > 1:
        for name, tally in found.corpora.items():
            typer.echo(f"  {name}: {_sentence(tally)}")


def _sentence(tally: Tally) -> str:
    bits = tally.bits_per_byte
    per_byte = f", {bits:.4f} bits a byte" if bits is not None else ""
    return f"loss {tally.loss:.4f}, perplexity {tally.perplexity:.4g}{per_byte}, {tally.tokens:,} tokens"


@contextmanager
def _shown(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, on standard error."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
