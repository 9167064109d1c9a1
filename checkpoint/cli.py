"""`resilient ckpt`: look at checkpoints from the command line.

Owns what a person sees of them. Changes nothing; imports what is heavy only when a command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints and verify them.")

_DAMAGED = 1
_UNUSABLE = 69


@app.command("ls")
def list_checkpoints(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="A directory of checkpoints, or a run directory.")],
) -> None:
    """List the checkpoints of a directory: step, generation, size, files, age. Reads only their manifests."""
    import time

    from rich.console import Console
    from rich.table import Table

    from checkpoint import manifest
    from checkpoint.errors import DamagedCheckpoint
    from checkpoint.naming import step_path, steps

    root = _directory(root)
    table = Table(box=None, pad_edge=False)
    for title in ("step", "generation", "MiB", "files", "age"):
        table.add_column(title, justify="right")
    table.add_column("")
    for step in steps(root):
        path = step_path(root, step)
        age = _age(time.time() - path.stat().st_mtime)
        try:
            found = manifest.read(path)
        except DamagedCheckpoint as error:
            table.add_row(str(step), "?", "?", "?", age, f"damaged: {error.reason}")
        else:
            size = f"{found.size_bytes / 2**20:.1f}"
            table.add_row(str(step), str(found.generation), size, str(len(found.files) + 1), age, "")
    Console(highlight=False).print(table)


@app.command("verify")
def verify_checkpoints(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a directory of checkpoints.")],
) -> None:
    """Read every byte and compare it with the manifest; exit 0 if all is well, 1 if something is damaged."""
    from checkpoint.errors import DamagedCheckpoint
    from checkpoint.naming import step_of, step_path, steps
    from checkpoint.verification import verify

    path = _directory(path)
    targets = [path] if step_of(path) is not None else [step_path(path, step) for step in steps(path)]
    if not targets:
        typer.echo(f"resilient: there is no checkpoint in {path}", err=True)
        raise typer.Exit(_UNUSABLE)
    damaged = False
    for target in targets:
        try:
            verify(target)
        except DamagedCheckpoint as error:
            damaged = True
            typer.echo(f"resilient: {error}", err=True)
        else:
            typer.echo(f"{target}: good")
    if damaged:
        raise typer.Exit(_DAMAGED)


def _directory(path: Path) -> Path:
    """The directory of checkpoints of a run directory, or the path itself."""
    if not path.is_dir():
        typer.echo(f"resilient: {path} is not a directory", err=True)
        raise typer.Exit(_UNUSABLE)
    path = path.resolve()
    inside = path / "checkpoints"
    return inside if inside.is_dir() else path


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
