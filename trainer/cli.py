"""`trainer`: evaluations, text and exports of checkpoints. Also there as `resilient trainer`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from checkpoint import given

if TYPE_CHECKING:
    from resilient.worker import Config
    from trainer.model import GPT

app = typer.Typer(
    no_args_is_help=True,
    help="Use what was trained: evaluate it, write text, export to Hugging Face.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Where = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT|RUN_DIR", help="a checkpoint (step-...), or a run directory: its newest one", parser=given.path
    ),
]
TokenizerFile = Annotated[Path | None, typer.Option(help="tokenizer.json; else the one the data was made with", parser=given.path)]


@app.command()
def generate(
    checkpoint: Where,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="how the text begins")],
    tokens: Annotated[int, typer.Option(min=1, help="how many to write at most")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="only the so many likeliest")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="only the likeliest of this probability in all")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    tokenizer: TokenizerFile = None,
) -> None:
    """Go on with a text."""
    from trainer.data import tokenizer as tokenizers
    from trainer.data.errors import DataError, StorageError
    from trainer.generate import NotFiniteError
    from trainer.generate import generate as write
    from trainer.sources import END_OF_TEXT, tokenizer_of_texts

    try:
        prompt.encode()
    except UnicodeEncodeError:
        _refuse("the prompt has bytes that are not UTF-8 text")
    model, config = _restored(_found(checkpoint), checkpoint)
    try:
        coder = tokenizers.load(tokenizer or tokenizer_of_texts(config))
    except DataError as error:
        _refuse(str(error), 69 if isinstance(error, StorageError) else 78)
    stop = coder.token_to_id(END_OF_TEXT)
    start = coder.encode(prompt).ids or [int(stop or 0)]
    size = tokenizers.vocabulary_size(coder)
    if size > model.shape.vocab:
        _refuse(f"the tokenizer has {size} tokens and the model {model.shape.vocab}: it is another one's")
    sys.stdout.write(prompt)
    written: list[int] = []
    shown = ""
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    try:
        for token in write(model, start, tokens, vocabulary=size, stop=stop, **options):  # type: ignore[arg-type]
            written.append(token)
            text = coder.decode(written)
            if not text.endswith("\ufffd"):  # half a character waits for its other half
                sys.stdout.write(text[len(shown) :])
                sys.stdout.flush()
                shown = text
    except NotFiniteError as error:
        sys.stdout.write("\n")
        _refuse(str(error))
    sys.stdout.write("\n")


@app.command()
def export(
    checkpoint: Where,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="directory to make", parser=given.path)],
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="of the weights")] = "bf16",
    tokenizer: TokenizerFile = None,
) -> None:
    """Write a directory that Hugging Face transformers loads: Llama, GPT-2 or GPT-NeoX, as safetensors."""
    import torch

    from trainer.export import ExportError
    from trainer.export import export as write
    from trainer.sources import tokenizer_of_texts

    source = _found(checkpoint)
    model, config = _restored(source, checkpoint)
    known = tokenizer or tokenizer_of_texts(config)
    if tokenizer is not None and not tokenizer.is_file():
        _refuse(f"there is no {tokenizer}; a tokenizer.json is expected there")
    try:
        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        layout = write(model, config, output, dtype=kind, tokenizer=known if known.is_file() else None)
    except ExportError as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"cannot write {error.filename or output}: {error.strerror or error}", 69)
    if not known.is_file():
        typer.echo(f"no tokenizer was written: there is no {known}; --tokenizer names another one", err=True)
    typer.echo(f"{output}: {layout}, {model.shape.parameters:,} parameters in {dtype}, of {source}")


@app.command()
def evaluate(
    checkpoint: Where,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PREFIX", help="an indexed dataset, read whole; again for more. Else the campaign's own", parser=given.path
        ),
    ] = None,
    split: Annotated[Literal["train", "valid", "test"], typer.Option(help="of the campaign's own data")] = "valid",
    samples: Annotated[
        int | None, typer.Option(min=1, help="so many of each; else as many as the campaign validates on, of --data all")
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="each checkpoint whose step is a multiple, unless it was evaluated before")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="wait for new checkpoints, until that of the campaign's last step is evaluated")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="samples at once; else the campaign's micro batch")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one")] = "auto",
    precision: Annotated[Literal["trained", "bf16", "fp32"], typer.Option(help="trained: that of the campaign")] = "trained",
    tokenizer: TokenizerFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="a line of JSON for each checkpoint")] = False,
) -> None:
    """Loss, perplexity and bits a byte of a checkpoint, by corpus; or of each checkpoint of a campaign while it runs.

    With --every or --follow, what was found is kept in the run directory (evaluations.jsonl, TensorBoard).
    """
    from trainer.evaluation.command import Options, Refused, evaluate_campaign, evaluate_one

    options = Options(tuple(data or ()), split, samples, batch_size, device, precision, tokenizer)
    try:
        if follow or every is not None:
            evaluate_campaign(checkpoint, options, every=every or 1, follow=follow, as_json=as_json)
        else:
            evaluate_one(checkpoint, options, as_json=as_json)
    except Refused as error:
        _refuse(str(error), error.code)


def _found(path: Path) -> Path:
    from trainer.restore import RestoreError, find

    try:
        return find(path)
    except RestoreError as error:
        _refuse(str(error), 69)


def _restored(found: Path, named: Path) -> "tuple[GPT, Config]":
    from trainer.restore import RestoreError, restore

    try:
        return restore(found, named=named)
    except RestoreError as error:
        _refuse(str(error), 69)


def _refuse(message: str, code: int = 78) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def main() -> None:
    """The console command, which ends and complains as `resilient trainer`."""
    from resilient.worker import command_line

    command_line(app)
