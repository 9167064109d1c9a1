"""`resilient ckpt`: look at checkpoints, compare, export and delete them from the command line.

Owns options and exit codes; the work is done in `checkpoint.tools`. Imports what is heavy only when a command runs.
"""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from checkpoint import given

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints; verify, compare, export and delete them.")

_BAD = 1  # damaged, or not equal, or declined

Where = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run directory, a directory of checkpoints, or a checkpoint.", parser=given.path)
]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="GLOB", help="Arrays of such names, as in 'model/*'; repeatable.")
]


@app.command("ls")
def list_checkpoints(
    path: Where,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte of the committed ones too.")] = False,
    as_json: Json = False,
) -> None:
    """List what every storage tier holds: step, generation, size, files, age, state. Reads only manifests."""
    from dataclasses import asdict

    from checkpoint.tools import listing, show
    from checkpoint.tools.bar import bar
    from checkpoint.tools.refusal import Refusal

    with _refusals_shown():
        _print_what_is_read(path)
        found = listing.entries(path)
        if verify:
            with bar("verifying", sum(entry.size_bytes or 0 for entry in found if entry.state == "committed")) as progress:
                found = [listing.verified(entry, progress) for entry in found]
        if as_json:
            show.as_json([asdict(entry) for entry in found])
        elif found:
            show.entries(found, with_verified=verify)
        if not found:
            raise Refusal(f"there is no checkpoint in {path}")


@app.command("verify")
def verify_checkpoints(path: Where, as_json: Json = False) -> None:
    """Read every byte and compare it with the manifest; exit 0 if all is well, 1 if something is damaged."""
    from dataclasses import asdict

    from checkpoint.tools import locations, show
    from checkpoint.tools.bar import bar
    from checkpoint.tools.refusal import Refusal

    with _refusals_shown():
        _print_what_is_read(path)
        found = locations.locations(path)
        targets = [location for location in found if locations.is_whole(location)]
        none = Refusal(f"there is no {'whole ' if found else ''}checkpoint in {path}")
        if not targets:
            raise none

        from checkpoint.tools.verifying import size_bytes, verdict

        verdicts = []
        with bar("verifying", sum(size_bytes(location.path) for location in targets)) as progress:
            for location in targets:
                read = verdict(location, progress)
                if read.good or locations.is_there(location):  # else it was deleted meanwhile
                    verdicts.append(read)
        if not verdicts:
            raise none
    if as_json:
        show.as_json([asdict(each) for each in verdicts])
    for each in verdicts:
        if not each.good:
            typer.echo(f"resilient: {each.path} is damaged: {each.reason}; use an older checkpoint or a copy of this one", err=True)
        elif not as_json:
            rate = each.bytes_read / 2**20 / max(each.seconds, 1e-9)
            typer.echo(f"{each.path}: good ({each.bytes_read / 2**20:.1f} MiB, {rate:.0f} MiB/s)")
    if len(targets) < len(found):
        typer.echo(f"resilient: {len(found) - len(targets)} shards of nodes were left out", err=True)
    if not all(each.good for each in verdicts):
        raise typer.Exit(_BAD)


@app.command("diff")
def compare_checkpoints(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, or a run directory: its newest one.", parser=given.path)],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.", parser=given.path)],
    atol: Annotated[float | None, typer.Option(help="Close: |a - b| <= atol + rtol * max(|a|, |b|).")] = None,
    rtol: Annotated[float | None, typer.Option(help="See --atol; each is 0 where only the other is given.")] = None,
    only: Only = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints number by number, whatever layouts wrote them.

    Exit 0 if all arrays are equal (bit by bit, or close where a tolerance is given), 1 if not. The small state is
    compared too, but has no say in the exit code.
    """
    with _refusals_shown():
        from checkpoint.tools import diff, locations, show
        from checkpoint.tools.bar import bar

        given = atol is not None or rtol is not None
        tolerance = diff.Tolerance(atol or 0.0, rtol or 0.0) if given else None
        _print_what_is_read(a, b)
        comparison = diff.Comparison(locations.one(a), locations.one(b), only=only or (), tolerance=tolerance)
        with bar("comparing", comparison.size_bytes) as progress:
            found = comparison.run(progress)
        if as_json:
            show.diff_as_json(found)
        else:
            show.diff(found)
    if not found.equal:
        raise typer.Exit(_BAD)


@app.command("export")
def export_checkpoint(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a run directory: its newest one.", parser=given.path)
    ],
    form: Annotated[
        str, typer.Option("--format", metavar="zarr|torch|hf", help="Plain Zarr v3, one torch.save file, Hugging Face.")
    ],
    output: Annotated[Path, typer.Option("--out", metavar="OUT", help="File or directory to make.", parser=given.path)],
    only: Only = None,
    float32: Annotated[bool, typer.Option("--float32", help="All floats with 32 bits.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write a checkpoint in another form. OUT appears whole or not at all."""
    with _refusals_shown():
        from checkpoint.tools import aside, export, locations
        from checkpoint.tools.bar import bar

        aside.check(output, force=force)
        _print_what_is_read(path)
        source = locations.one(path)
        built_in = form in ("zarr", "torch")
        with bar("exporting", export.size_bytes(source, only or ()) if built_in else 0) as progress:
            written = export.export(source, form, output, only=only or (), float32=float32, force=force, progress=progress)
        typer.echo(f"{output}: {written}, from {source}")


@app.command("import")
def import_checkpoint(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Directory that they have saved.", parser=given.path)],
    output: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory that is to begin with these weights.", parser=given.path)
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="Of the campaign; else RUN_DIR/model.yaml has the model's keys.",
            parser=given.path,
        ),
    ] = None,
    form: Annotated[str, typer.Option("--format", metavar="hf|megatron", help="Hugging Face transformers, Megatron-LM.")] = "hf",
) -> None:
    """Begin with what others have trained: weights as step 0 with a new optimizer, or with Megatron-LM's optimizer where it was."""
    with _refusals_shown():
        from checkpoint.tools import importing

        os.umask(0o077)
        typer.echo(f"{output}: {importing.run(source, form, output, config=config)}")


@app.command("flush")
def flush_snapshot(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory whose run is dead.", parser=given.path)],
    group: Annotated[bool, typer.Option("--group", help="Trust what members of your groups have written there.")] = False,
) -> None:
    """Commit the newest snapshot that the nodes of a dead run still hold, in RAM or on their disks, on this machine."""
    from checkpoint.tools import flushing
    from checkpoint.tools.bar import bar

    with _refusals_shown():
        held, root = flushing.newest(path, group=group)
        if held is None:
            typer.echo(f"nothing is held that is newer than what is in {root}")
            return
        os.umask(0o027 if path.stat().st_mode & stat.S_IRGRP else 0o077)  # as the run itself would have it
        with bar("flushing", held.size_bytes) as progress:
            written = flushing.flush(held, root, progress)
        typer.echo(f"{written}: step {held.step}, {held.size_bytes / 2**20:.1f} MiB from {len(held.copies)} nodes")


@app.command("prune")
def prune_checkpoints(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A run directory (its durable tier), or a directory of checkpoints.", parser=given.path
        ),
    ],
    keep_last: Annotated[int, typer.Option("--keep-last", metavar="N", help="Keep the newest N.")],
    keep_every: Annotated[int | None, typer.Option("--keep-every", metavar="K", help="Keep steps that are multiples of K.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete superseded checkpoints, and what is left of earlier deletions.

    Reads every byte of the newest N first: one that is damaged stays, and does not count.
    """
    from checkpoint.tools import pruning
    from checkpoint.tools.refusal import Refusal

    with _refusals_shown():
        plans = pruning.plans(path, keep_last, keep_every)
        for plan in plans:
            for wrong in plan.damaged.values():
                typer.echo(f"resilient: {wrong}", err=True)
        count = sum(len(plan.gone) for plan in plans)
        if not count:
            typer.echo("nothing is superseded")
            return
        for plan in plans:
            for gone, size in plan.gone:
                typer.echo(f"{gone}: {size / 2**20:.1f} MiB")
        total = f"{count} directories, {sum(plan.freed_bytes for plan in plans) / 2**20:.1f} MiB"
        kept = ", ".join(str(step) for plan in plans for step in plan.kept) or "none"
        if damaged := ", ".join(str(step) for plan in plans for step in plan.damaged):
            kept += f"; and {damaged}, which cannot be used and do not count"
        if dry_run:
            typer.echo(f"would delete {total}; steps that stay: {kept}")
            return
        if not yes:
            if not sys.stdin.isatty():
                raise Refusal("nothing was deleted: say --yes where nobody can be asked", _BAD)
            if not typer.confirm(f"Delete {total}? Steps that stay: {kept}."):
                typer.echo("resilient: nothing was deleted", err=True)
                raise typer.Exit(_BAD)
        for plan in plans:
            pruning.carry_out(plan, keep_last, keep_every)
        typer.echo(f"deleted {total}; steps that stay: {kept}")


def _print_what_is_read(*paths: Path) -> None:
    """And what is not, where that may surprise."""
    from checkpoint.tools.locations import not_readable, read_of_another

    for path in paths:
        for told in (*read_of_another(path), *not_readable(path)):
            typer.echo(f"resilient: {told}", err=True)


@contextmanager
def _refusals_shown() -> Iterator[None]:
    """Every foreseen failure becomes one message and its exit code."""
    from checkpoint.errors import CheckpointError, CheckpointMismatch
    from checkpoint.tools.refusal import UNUSABLE, WRONG, Refusal

    try:
        yield
    except Refusal as error:
        _end(str(error), error.code)
    except CheckpointMismatch as error:
        _end(str(error), WRONG)
    except CheckpointError as error:
        _end(str(error), UNUSABLE)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _end(f"{where}{error.strerror}" if error.strerror else str(error), UNUSABLE)


def _end(message: str, code: int) -> NoReturn:
    typer.echo(f"resilient: {message}", err=True)
    raise typer.Exit(code)
