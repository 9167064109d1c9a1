"""The commands and their options. What a command does stands elsewhere and is imported when it is called."""

import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from checkpoint import given
from resilient.exits import ForeseenError
from resilient.main import complain, stop_early_on_signals

app = typer.Typer(
    name="resilient",
    help="Train through whatever happens: one config file, one command.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The campaign's YAML file.", parser=given.path)]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The campaign's run directory.", parser=given.path)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the config to set, as in train.steps=200.", show_default=False),
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept",
        metavar="KEY",
        help="Go on although this key has changed since the campaign began; told and recorded. May be repeated.",
        show_default=False,
    ),
]


def _must_be_file(path: Path | None, option: str) -> None:
    """What is to be written: found out before there is much of it."""
    if path is not None and (path.name in ("", "..") or path.is_dir()):
        raise typer.BadParameter(f"{path} is a directory, and a file is wanted", param_hint=option)


def _version(wanted: bool) -> None:
    if wanted:
        from resilient.version import described

        typer.echo(f"resilient {described()}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},  # what follows a script is the script's
    epilog="resilient run config.yaml train.steps=200 · resilient run --procs 4 train.py --lr 3e-4 · resilient run -m pkg.module",
)
def run(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[KEY=VALUE]... CONFIG [KEY=VALUE]... | SCRIPT.py [ARG]... | -m MODULE [ARG]...",
            help="The campaign's YAML file, or in torchrun's place a training script or a module and its arguments.",
        ),
    ],
    module: Annotated[bool, typer.Option("-m", "--module", help="What is named is a module, as for python -m.")] = False,
    procs: Annotated[int | None, typer.Option("--procs", min=1, help="Ranks per node: torchrun's --nproc-per-node.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes; on one machine processes stand for them.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="RUN_DIR", help="In place of runs/NAME.", parser=given.path)
    ] = None,
    accept: Accept = None,
) -> None:
    """Run a campaign, or go on with it: on this machine or inside a job.

    Ctrl-C or SIGTERM stops at the next step with a checkpoint (exit 75); the same command goes on from there.
    """
    named = next((word for word in words if "=" not in word), "-")
    if not named:
        raise typer.BadParameter("CONFIG is empty; is a variable not set?")
    from resilient.access import restrict
    from resilient.driver.driver_log import DriverLog
    from resilient.driver.terminal import patient

    restrict("private")  # until the config is read
    log = DriverLog()
    with patient(log):
        stop_early_on_signals(log)
        from resilient.driver.launch import AgentAhead
        from resilient.run_words import asks_for_help, understand

        if not module and asks_for_help(words):
            typer.echo(context.get_help())
            raise typer.Exit
        try:
            told = understand(words, module=module, procs=procs, nodes=nodes, run_dir=run_dir, accept=accept or ())
            with closing(AgentAhead()) if "SLURM_JOB_ID" not in os.environ else nullcontext() as ahead:
                from resilient.driver.command import run_command  # while that agent imports torch

                code = run_command(told, ahead, log)
        except ForeseenError as error:
            code = complain(error)
    raise typer.Exit(code)


@app.command()
def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, and submit nothing.")] = False,
    accept: Accept = None,
) -> None:
    """Run a campaign as a chain of jobs of Slurm: one runs, the next one waits, until the target is reached."""
    from resilient.access import restrict
    from resilient.campaign import already_reached, doubt_of_durable
    from resilient.config import ConfigError, attribute, load
    from resilient.decided import decided
    from resilient.identity.resume import Known
    from resilient.preflight import must_be_startable
    from resilient.slurm.succession import submit as begin

    given = overrides or []
    loaded = load(config, given)
    must_be_startable(config, given, loaded, in_a_job=True)
    restrict(loaded.run_dir_mode)
    try:  # as the first job will: better now than after a night in the queue
        known = Known.of(loaded, config, given)
        loaded, _ = known.keep(loaded)
        resumption = known.resume(decided(loaded)[0], None, accept or ())
    except ConfigError as error:
        raise attribute(error, config, given) from None
    reached = already_reached(loaded)
    if reached is not None and not dry_run:
        typer.echo(f"{loaded.name} has reached its target: step {reached} of {loaded.train.steps} is in {loaded.run_dir}")
        return
    if (doubt := doubt_of_durable(loaded)) is not None:  # a warning: the path may be there on compute nodes alone
        typer.echo(attribute(ConfigError([doubt]), config, given), err=True)
    words = [word for key in accept or () for word in ("--accept", key)]
    for note in () if dry_run else resumption.notes():
        typer.echo(note)
    try:
        typer.echo(begin(loaded, [*words, str(config.resolve()), *given], dry_run=dry_run))
    except ConfigError as error:
        raise attribute(error, config, given) from None


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Order the layouts of its ranks by predicted step time.")] = False,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results",
            metavar="DIR|FILE",
            help="Of `resilient bench`: its directory or results.jsonl, whose steps say how fast work is done.",
            parser=given.path,
        ),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option("--rate", metavar="NAME=VALUE", help="A rate, as flops_per_s=4e14; may be given several times."),
    ] = None,
) -> None:
    """Check a config and say what it comes to: layout, memory, checkpoints, timeouts."""
    from resilient.campaign import machine_layout
    from resilient.config import ConfigError, attribute, from_site, load, notes
    from resilient.decided import decided
    from resilient.plan import show
    from resilient.sinks.packages import missing

    if (results or rate) and not suggest:
        raise typer.BadParameter("goes with --suggest", param_hint="--results" if results else "--rate")
    given = overrides or []
    loaded = load(config, given)
    if problems := missing(loaded):
        raise attribute(ConfigError(problems), config, given)
    try:
        if suggest:
            from resilient.suggest import suggest as order

            order(loaded, results, rate or [])
            return
        loaded, decisions = decided(loaded)
        show(loaded, machine_layout(loaded), from_site(config, given), decisions, notes(config, given))
    except ConfigError as error:
        raise attribute(error, config, given) from None


@app.command()
def status(
    run_dir: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every two seconds, until Ctrl-C; not with --json.")] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the campaign: loss, faults, recoveries.", parser=given.path)
    ] = None,
    pid: Annotated[
        str | None, typer.Option("--pid", metavar="RANK|driver", help="Print one process id, if it is of this machine.")
    ] = None,
) -> None:
    """Say how a campaign is doing, running or not."""
    from resilient.processes import local_pid, process_name
    from resilient.status import draw, show, watch_forever

    if watch and as_json:
        raise typer.BadParameter("does not go with --watch", param_hint="--json")
    if pid is not None:
        try:
            name = process_name(pid)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--pid") from None
        typer.echo(local_pid(run_dir, name))
        return
    _must_be_file(svg, "--svg")
    if svg is not None:
        typer.echo(draw(run_dir, svg))
        return
    if watch:
        watch_forever(run_dir)
    show(run_dir, as_json=as_json)


@app.command()
def report(
    run_dir: RunDir,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="In place of RUN_DIR/report.html.", parser=given.path)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page on a loopback port and keep it fresh, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", min=0, max=65535, help="With --watch; default: any that is free.")
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print it as Markdown, for an issue or a chat.")] = False,
) -> None:
    """Write what happened to a campaign as one HTML file: curves, faults, jobs, nodes, checkpoints, where the time went."""
    from resilient.access import restrict_as
    from resilient.report import command

    if port is not None and not watch:
        raise typer.BadParameter("goes with --watch", param_hint="--port")
    if as_markdown and watch:
        raise typer.BadParameter("does not go with --watch", param_hint="--markdown")
    if output is not None and (as_markdown or watch):
        raise typer.BadParameter(f"does not go with --{'markdown' if as_markdown else 'watch'}", param_hint="--output")
    _must_be_file(output, "--output")
    if as_markdown:
        typer.echo(command.as_markdown(run_dir), nl=False)
    elif watch:
        command.serve(run_dir, port or 0, typer.echo)
    else:
        if output is None or output.absolute().is_relative_to(run_dir.absolute()):
            restrict_as(run_dir)
        typer.echo(command.write(run_dir, output))


@app.command()
def fork(
    parent: Annotated[
        str,
        typer.Argument(metavar="RUN_DIR[@STEP]", help="The campaign, at its newest checkpoint or this.", parser=given.not_empty),
    ],
    run_dir: Annotated[Path, typer.Argument(metavar="NEW_RUN_DIR", help="The new campaign's run directory.", parser=given.path)],
    overrides: Overrides = None,
) -> None:
    """Branch a campaign off another one at a checkpoint, with other keys; both can go on, and neither touches the other."""
    from resilient.lineage.fork import fork as branch_off
    from resilient.lineage.fork import parent_of

    try:
        directory, step = parent_of(parent)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="RUN_DIR[@STEP]") from None
    typer.echo("\n".join(branch_off(directory, step, run_dir, overrides or []).lines()))


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A campaign's run directory.", parser=given.path)],
    b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another one's.", parser=given.path)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Say how two campaigns differ: config, identity, and losses at the steps that both have."""
    from resilient.lineage.comparison import show

    show(a, b, as_json=as_json)


@app.command()
def attach(
    run_dir: RunDir,
) -> None:
    """Show the live display of a campaign that another terminal, job or node has started; Ctrl-C ends this command alone."""
    from resilient.follow import follow

    typer.echo(follow(run_dir))


@app.command()
def watch(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories.", parser=given.path)],
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify", metavar="COMMAND", help="Run when the state of one has changed, with RESILIENT_STATE and others set."
        ),
    ] = None,
    every_s: Annotated[
        float | None,
        typer.Option("--every", metavar="SECONDS", min=1.0, help="Look again and again, until all are over or Ctrl-C."),
    ] = None,
    patience_s: Annotated[
        float | None,
        typer.Option("--patience", metavar="SECONDS", min=1.0, help="Without a step it is stalled; default: by its steps."),
    ] = None,
    memory: Annotated[
        Path | None,
        typer.Option(
            "--memory", metavar="FILE", help="Where states are kept for --notify; default: in ~/.local/state.", parser=given.path
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on a line, for programs.")] = False,
) -> None:
    """Say whether campaigns make progress, for a login node or cron: by the exit code, and to a command when that changes.

    0: all make progress, wait for a job, or have reached their target; 3: stalled; 4: dead; 69: not to be told; 70: gave up;
    75: stopped.
    """
    from resilient.watch.command import Wanted
    from resilient.watch.command import watch as look
    from resilient.watch.memory import default_path

    _must_be_file(memory, "--memory")
    wanted = Wanted(run_dirs, patience_s, notify, memory or (default_path() if notify else Path(os.devnull)), every_s, as_json)
    raise typer.Exit(look(wanted, typer.echo))


@app.command()
def logs(
    run_dir: RunDir,
    rank: Annotated[int | None, typer.Option("--rank", metavar="RANK", min=0, help="Of this rank only.")] = None,
    node: Annotated[int | None, typer.Option("--node", metavar="NODE", min=0, help="Of this node only.")] = None,
    generation: Annotated[int | None, typer.Option("--generation", metavar="N", min=1, help="In place of the newest.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="From then on: 10m, 2h, 14:30, '2026-01-31 14:30'.")
    ] = None,
) -> None:
    """Show what ranks have printed, line by line with time and rank; packed generations, too."""
    from resilient.logs import command
    from resilient.logs.reading import Wanted

    try:
        since = command.since(since)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--since") from None
    command.show(run_dir, Wanted(rank, node, since), generation, following=follow)


@app.command()
def bench(
    grid: Annotated[Path, typer.Argument(metavar="GRID", help="The grid's YAML file.", parser=given.path)],
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="In place of runs/bench/NAME.", parser=given.path)
    ] = None,
    best: Annotated[
        Path | None, typer.Option("--best", metavar="FILE", help="Write the fastest cell's keys there, as YAML.", parser=given.path)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Run cells that were not measured before once more.")] = False,
) -> None:
    """Measure layouts: each cell of a grid as a short campaign; those that were run before are not run again."""
    from resilient.bench.command import bench as run_grid

    _must_be_file(best, "--best")
    run_grid(grid, directory=directory, again=again, best=best)


@app.command()
def sinks(
    run_dir: RunDir,
) -> None:
    """Send what the sinks of a campaign have not taken yet, as from a login node that has a network; Ctrl-C ends it."""
    from resilient.sinks.command import send

    typer.echo(send(run_dir))


@app.command()
def stop(
    run_dir: RunDir,
) -> None:
    """Stop a campaign at its next step, with its state made durable; no further job of its chain follows."""
    from resilient.halt import halt

    typer.echo(halt(run_dir))


@app.command()
def evacuate(
    run_dir: RunDir,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its number, or its host.")],
    resume: Annotated[bool, typer.Option("--resume", help="It may be used again.")] = False,
) -> None:
    """Leave a node that is about to go, at a step boundary: a spare takes over, or fewer nodes go on; nothing is computed again."""
    from resilient.evacuate import evacuate as ask

    typer.echo(ask(run_dir, node, resume=resume))


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG | JOB.sh]",
            help="What the machine is to be fit for; or a batch script, which is checked instead.",
            parser=given.path,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    limit_s: Annotated[float, typer.Option("--limit", metavar="SECONDS", min=1.0, help="For all checks together.")] = 120.0,
    security: Annotated[
        Path | None,
        typer.Option(
            "--security",
            metavar="RUN_DIR",
            help="Check a campaign instead: whose its files are, who may read or write them, and, while it runs, on which "
            "addresses its processes of this machine listen.",
            parser=given.path,
        ),
    ] = None,
) -> None:
    """Check the health of this machine: GPUs, links, tiers, clock, limits, and whether it computes right (exit 69 if not).

    With a batch script: name the traps in it (exit 78 if there are any). Nothing of it is run.
    """
    from resilient.health.command import doctor as examine

    code, left_behind = examine(config, overrides or [], security, limit_s=limit_s, as_json=as_json)
    if left_behind:
        sys.stdout.flush()
        os._exit(code)  # the interpreter would wait for processes that do not go
    raise typer.Exit(code)
