"""`resilient lab`: hosts to break, from the command line.

Owns options and exit codes; the work is done in `chaos.lab`. Imports what is heavy only when a command runs.
"""

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from chaos.lab.lab import Lab

app = typer.Typer(no_args_is_help=True, help="Hosts to break on this machine, with a real Slurm if wanted. Needs root.")

HostName = Annotated[str, typer.Argument(metavar="HOST", help="n1, n2, and so on.")]


@app.callback()
def _which(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", envvar="RESILIENT_LAB", help="Of the lab, where there are several.")] = "lab",
) -> None:
    context.obj = name


def _lab(context: typer.Context) -> "Lab":
    from chaos.lab.lab import Lab
    from chaos.lab.needs import demand
    from chaos.lab.shape import LabPaths

    demand(slurm=False)
    return Lab(LabPaths(context.obj))


@app.command()
def up(
    context: typer.Context,
    hosts: Annotated[int, typer.Option("--hosts", help="How many: n1, n2, and so on.")] = 4,
    slurm: Annotated[bool, typer.Option("--slurm", help="Run Slurm over them.")] = False,
    cpus: Annotated[int, typer.Option("--cpus", min=1, help="Of each host, as Slurm counts them.")] = 2,
    disk_mib: Annotated[int, typer.Option("--disk-mib", min=1, help="What a host's NVMe holds, and its /dev/shm.")] = 4096,
    slurmd_timeout_s: Annotated[int, typer.Option("--slurmd-timeout", help="Seconds of silence until a host is down.")] = 30,
    kill_wait_s: Annotated[int, typer.Option("--kill-wait", help="Seconds from SIGTERM to SIGKILL at the time limit.")] = 30,
    grace_s: Annotated[int, typer.Option("--grace", help="The same for a job that is preempted.")] = 30,
    max_time_min: Annotated[int, typer.Option("--max-time", min=1, help="Minutes that the partition `limited` allows.")] = 1,
    message_timeout_s: Annotated[
        int, typer.Option("--message-timeout", min=1, help="Seconds that Slurm waits for an answer.")
    ] = 10,
) -> None:
    """Bring the lab up. One of the same shape that is up already stays as it is."""
    from chaos.lab.shape import Shape, SlurmTimes

    times = SlurmTimes(slurmd_timeout_s, kill_wait_s, grace_s, max_time_min, message_timeout_s)
    fresh = _lab(context).up(Shape(hosts, slurm, cpus, disk_mib, times))
    typer.echo(f"The lab is up{'' if fresh else ' already'}: {hosts} hosts{' with Slurm' * slurm}.")


@app.command("exec", context_settings={"ignore_unknown_options": True})
def execute(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="[HOST] -- COMMAND...", help="Without HOST: where jobs are submitted.")],
) -> None:
    """Run a command on a host, or where jobs are submitted, with its exit status; HOST alone: a shell there."""
    lab = _lab(context)
    host, *rest = words
    if host in lab.shape().all_names:
        line = lab.command(rest or [os.environ.get("SHELL", "/bin/sh")], host=host)
    else:
        line = lab.command(words)
    os.execvp(line[0], line)


@app.command()
def flap(
    context: typer.Context,
    host: HostName,
    seconds: Annotated[float, typer.Argument(metavar="SECONDS", min=0.0, help="For which the link is down.")],
) -> None:
    """Take a host's link down for some seconds."""
    _lab(context).flap(host, seconds)


@app.command()
def crash(context: typer.Context, host: HostName) -> None:
    """A host is gone: its link, every process on it, and what its RAM and its NVMe held."""
    _lab(context).crash(host)


@app.command()
def boot(context: typer.Context, host: HostName) -> None:
    """A host that crashed comes back, empty."""
    _lab(context).boot(host)


@app.command()
def status(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False
) -> None:
    """Say which hosts there are, and how they are."""
    import json
    from dataclasses import asdict

    lab = _lab(context)
    found = lab.status()
    if as_json:
        typer.echo(json.dumps({"up": bool(found), "hosts": [asdict(each) for each in found]}))
    elif not found:
        typer.echo("The lab is not up.")
    for each in found if not as_json else ():
        slurm = f"   slurm {each.slurm}" if each.slurm else ""
        typer.echo(f"{each.name:4} {each.address:12} {each.state:8} link {each.link:5}{slurm}")


@app.command()
def down(context: typer.Context) -> None:
    """Remove the lab and all that runs in it; what a command that was killed has left of it, too."""
    removed = _lab(context).down()
    typer.echo("The lab is down." if removed else "There was no lab.")
