"""`resilient data`: build datasets from the command line.

Owns options, what is shown, and exit codes. Nothing heavy is imported until a command runs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from checkpoint import given

if TYPE_CHECKING:
    from trainer.data.build import Progress

BAD_INPUT = 78
UNUSABLE = 69
INTERRUPTED = 130
TERMINATED = 143

app = typer.Typer(no_args_is_help=True, help="Turn text into datasets.")


@app.callback()
def _group() -> None:
    pass


@app.command()
def build(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT...", help="Text files, or JSONL files (.jsonl, .ndjson, .json).", parser=given.path),
    ],
    output: Annotated[
        Path,
        typer.Option(
            metavar="PREFIX", help="Where to: PREFIX.bin, PREFIX.idx, PREFIX.tokenizer.json, PREFIX.json.", parser=given.path
        ),
    ],
    vocab_size: Annotated[int, typer.Option(help="Size of the byte-level BPE that is trained, at least 257.")] = 4096,
    vocab_file: Annotated[Path | None, typer.Option(help="GPT-2 vocab.json, instead of training.", parser=given.path)] = None,
    merges_file: Annotated[Path | None, typer.Option(help="GPT-2 merges.txt, with --vocab-file.", parser=given.path)] = None,
    json_key: Annotated[str, typer.Option(help="Key of the text in a line of JSONL.")] = "text",
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
    append_eod: Annotated[bool, typer.Option(help="End each document with the end-of-text token.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Build even if the same is there, or something not built here.")] = False,
) -> None:
    """Build an indexed dataset, readable by Megatron-LM.

    A text file is one document, or several separated by lines that say <|endoftext|>. In a JSONL file each line is one.
    """
    import os
    import signal

    from trainer.data.build import Vocabulary
    from trainer.data.build import build as build_dataset
    from trainer.data.documents import Files
    from trainer.data.errors import DataError, StorageError, WorkerEndedError

    def terminated(*_: object) -> NoReturn:
        sys.exit(TERMINATED)  # by way of the clean-up

    signal.signal(signal.SIGTERM, terminated)
    try:
        with _shown() as progress:
            made = build_dataset(
                Files(inputs, json_key),
                output,
                Vocabulary(vocab_size, vocab_file, merges_file),
                workers=workers or len(os.sched_getaffinity(0)),
                progress=progress,
                append_eod=append_eod,
                force=force,
            )
    except (StorageError, WorkerEndedError) as error:
        _fail(str(error), UNUSABLE)
    except DataError as error:
        _fail(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        _fail("stopped; nothing was left behind", INTERRUPTED)
    state = "is there already" if made.reused else "built"
    typer.echo(f"{output}: {state}: {made.documents:,} documents, {made.tokens:,} tokens, vocabulary {made.vocab_size:,}")


@contextmanager
def _shown() -> "Iterator[Callable[[Progress], None]]":
    """A bar on a terminal, else a line per stage, both on standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        shown = ""
        task = bar.add_task("reading the text", total=None)

        def show(now: "Progress") -> None:
            nonlocal shown
            if now.stage != shown:
                bar.reset(task)  # so that speed and time left are of this stage
                shown = now.stage
            documents = f", {now.documents:,} documents" if now.documents else ""
            bar.update(task, description=now.stage + documents, completed=now.done_bytes, total=now.total_bytes or None)

        yield show


def _lines() -> "Callable[[Progress], None]":
    shown = ""

    def show(now: "Progress") -> None:
        nonlocal shown
        if now.stage != shown:
            size = f": {now.total_bytes / 1e6:,.1f} MB" if now.total_bytes else ""
            typer.echo(f"{now.stage}{size}", err=True)
            shown = now.stage

    return show


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"resilient: {message}", err=True)
    sys.exit(code)
