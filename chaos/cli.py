"""`resilient chaos`: break a campaign on purpose, and see whether it recovers.

Owns options and exit codes. Imports what is heavy only when a command runs.
"""

import typer

app = typer.Typer(no_args_is_help=True, help="Inject faults into a campaign, watch it recover, print the verdict.")


@app.command("list")
def catalogue() -> None:
    """Say which faults there are."""
    from chaos import faults
    from chaos.fault import describe

    for name in faults.names():
        typer.echo(f"{name:24} {describe(faults.kind(name))}")
