"""`resilient chaos`: break a campaign on purpose, and see whether it recovers.

Owns options and exit codes. Imports what is heavy only when a command runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from checkpoint import given

app = typer.Typer(no_args_is_help=True, help="Inject faults into a campaign, watch it recover, print the verdict.")

Named = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT", help="A YAML file, or the name of one that comes along, as quick.", parser=given.not_empty
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Of chance: the same one gives the same faults.", show_default=False)]
Minutes = Annotated[float | None, typer.Option("--minutes", min=0.1, help="For which a random mix goes on.", show_default=False)]


@app.command()
def run(
    experiment: Named,
    seed: Seed = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="So often, each time with the next seed.")] = 1,
    minutes: Minutes = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="For what is written; else in runs/chaos.", parser=given.path)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN_DIR", help="Break the campaign that runs there, if it allows it.", parser=given.path),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each time, for programs.")] = False,
) -> None:
    """Break a campaign as an experiment says, and judge how it recovers: exit 0 if all is well, 1 if not."""
    from rich.console import Console

    from chaos.experiment import find, lasting, located, read, seed_of
    from chaos.orchestration import execution
    from chaos.orchestration.display import Lines
    from chaos.verdict.report import as_json as as_json_object
    from chaos.verdict.report import show
    from resilient import strict_json

    file = find(experiment)
    wanted = lasting(read(file), minutes)
    console = Console(stderr=as_json, highlight=False)
    display = Lines(console)
    first = seed_of(wanted, seed)
    good, reference = True, None
    for number in range(first, first + repeat):
        name = f"{wanted.name}-{number}"
        directory = execution.fresh(execution.RESULTS, name) if out is None else execution.given(out if repeat == 1 else out / name)
        with located(file):
            if run_dir is not None:
                result = execution.attach(wanted, number, run_dir.absolute(), directory, display)
            else:
                result = execution.perform(wanted, file, number, directory, reference, display)
        if run_dir is None:
            reference = result.reference if wanted.campaign.until == "target" else None
        if as_json:
            typer.echo(strict_json.dumps(as_json_object(result.verdict)))
        else:
            show(result.verdict, console)
        good &= result.verdict.ok
    raise typer.Exit(0 if good else 1)


@app.command()
def plan(experiment: Named, seed: Seed = None, minutes: Minutes = None) -> None:
    """Say what an experiment would do, and what cannot be done here."""
    import tempfile

    from rich.console import Console

    from chaos.experiment import find, lasting, located, read, seed_of
    from chaos.fitting import fit
    from chaos.orchestration import execution
    from chaos.orchestration.campaign import resolve
    from chaos.orchestration.display import show_plan
    from chaos.planning import plan as planned

    file = find(experiment)
    wanted = lasting(read(file), minutes)
    with located(file):
        with tempfile.TemporaryDirectory() as directory:
            config = resolve(wanted.campaign, file, Path(directory), allow=True)
        fit(wanted, config)
        made = planned(wanted, seed_of(wanted, seed), execution.world_of(config, execution.has_here(wanted, config)))
    show_plan(Console(highlight=False), made)


@app.command("list")
def catalogue() -> None:
    """Say which faults there are, what they need, and whether that is at hand here."""
    from rich.console import Console

    from chaos.fault import Need
    from chaos.lab.needs import missing
    from chaos.orchestration.display import show_faults
    from chaos.orchestration.sites import rights

    lab = frozenset() if missing(slurm=True) else {Need.LAB, Need.SLURM}
    show_faults(Console(highlight=False), rights() | {Need.ONE_MACHINE} | lab)
