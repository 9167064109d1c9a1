"""`resilient data`: build datasets from the command line."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Turn text into datasets.")

BAD_INPUT = 78


@app.callback()
def _group() -> None:
    pass


@app.command()
def build(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="Text files, or JSONL files (.jsonl, .json).")],
    output: Annotated[Path, typer.Option(metavar="PREFIX", help="Where to: PREFIX.bin, PREFIX.idx, PREFIX.tokenizer.json.")],
    vocab_size: Annotated[int, typer.Option(min=257, help="Size of the byte-level BPE that is trained.")] = 4096,
    vocab_file: Annotated[Path | None, typer.Option(help="GPT-2 vocab.json, instead of training.")] = None,
    merges_file: Annotated[Path | None, typer.Option(help="GPT-2 merges.txt, with --vocab-file.")] = None,
    json_key: Annotated[str, typer.Option(help="Key of the text in a line of JSONL.")] = "text",
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: one per core.")] = 0,
    append_eod: Annotated[bool, typer.Option(help="End each document with the end-of-text token.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Build it even if the same dataset is there.")] = False,
) -> None:
    """Build an indexed dataset, readable by Megatron-LM.

    A text file is one document, or several separated by lines that say <|endoftext|>. In a JSONL file each line is one.
    """
    import os

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from trainer.data.build import Files, Vocabulary
    from trainer.data.build import build as build_dataset
    from trainer.data.errors import DataError

    if (vocab_file is None) != (merges_file is None):
        _fail("--vocab-file and --merges-file go together")
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("reading")
            made = build_dataset(
                Files(inputs, json_key),
                output.absolute(),
                Vocabulary(vocab_size, vocab_file, merges_file),
                workers=workers or len(os.sched_getaffinity(0)),
                progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
                append_eod=append_eod,
                force=force,
            )
    except DataError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write {error.filename or output}: {error.strerror}")
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was left behind", err=True)
        raise typer.Exit(130) from None
    state = "is there already" if made.reused else "built"
    typer.echo(f"{output}: {state}: {made.documents:,} documents, {made.tokens:,} tokens, vocabulary {made.vocab_size:,}")


def _fail(message: str) -> None:
    typer.echo(f"resilient: {message}", err=True)
    sys.exit(BAD_INPUT)
