"""`resilient run`: from the words of the command line to the exit code, and what the terminal shows before and after a campaign."""

import asyncio
import logging
import os
import socket
from pathlib import Path

import typer
from rich.console import Console

from checkpoint import descriptors
from checkpoint.asking import answers
from resilient import throughput
from resilient.access import restrict
from resilient.answering import DoesNotAnswer
from resilient.campaign import allocation_of, already_reached, fitted, machine_layout, shares_of_gpus
from resilient.config import ConfigError, attribute, load, notes, with_shards
from resilient.decided import decided
from resilient.driver.campaign import chain_of_job, end_chain, end_chain_at_target, follow, run_campaign
from resilient.driver.display import Display
from resilient.driver.driver_log import DriverLog
from resilient.driver.farewell import LOOK_S, cost_of_a_kill, farewell, greeting, last_saved, looked_back, sequel, waiting_behind
from resilient.driver.launch import AgentAhead
from resilient.driver.terminal import drain
from resilient.exits import EnvironmentUnusable, Exit
from resilient.health import machine
from resilient.identity.resume import Known, versions_here
from resilient.main import complain
from resilient.preflight import must_be_startable
from resilient.run_words import Told
from resilient.slurm.requeued import ask_for, requeue_of
from resilient.slurm.script import CHAIN_VARIABLE
from resilient.slurm.succession import Succession
from resilient.watch.look import without_last_word


def run_command(told: Told, ahead: AgentAhead | None, log: DriverLog) -> Exit:
    """Run a campaign, or go on with it. Args: ahead: an agent that was started before anything is known of the campaign."""
    given = os.environ.pop(CHAIN_VARIABLE, None)  # for this process alone: what the job starts is not the job
    run_dir = None if given is None else Path(given)
    try:
        return _run(told, ahead, log)
    except (ConfigError, EnvironmentUnusable) as error:
        chain = end_chain if isinstance(error, ConfigError) else chain_of_job
        if isinstance(error, DoesNotAnswer):  # the chain's record may be there
            found = answers(lambda file: chain(file, told.settings, run_dir), [told.config], LOOK_S).get(told.config)
            chained = found if isinstance(found, Succession) else None
        else:
            chained = chain(told.config, told.settings, run_dir)
        if chained is None:
            raise
        complain(error)
        if isinstance(error, EnvironmentUnusable):
            follow(chained, told.config, told.settings, error.code)
        if (last := sequel(error.code, waiting_behind(chained))) is not None:
            typer.echo(last)
        return error.code


def _run(told: Told, ahead: AgentAhead | None, log: DriverLog) -> Exit:
    config, given = told.config, list(told.settings)
    loaded = load(config, given)
    must_be_startable(config, given, loaded)
    restrict(loaded.run_dir_mode)
    allocation = allocation_of(loaded)
    if allocation is not None and allocation.task > 0:
        return Exit.OK  # one of many that srun has started; the first one starts an agent on each node
    _log_to_stderr(loaded.logging.level)
    logging.getLogger().addHandler(log)
    known = Known.of(loaded, config, given)
    loaded, kept = known.keep(loaded)
    loaded, decisions = decided(fitted(loaded, allocation))
    layout = machine_layout(loaded, allocation)
    loaded = with_shards(loaded, layout)
    if allocation is None:
        shares_of_gpus(loaded, layout)  # too few are refused before anything starts
        _must_be_allowed(layout.world_size, checked=loaded.resilience.health_check is not False)
    shrunk = allocation is not None and allocation.gone
    try:
        resumption = known.resume(loaded, None if shrunk else layout, told.accept, versions_here(loaded, allocation is not None))
    except ConfigError as error:
        raise attribute(error, config, given) from None
    console = Console(highlight=False, markup=False, emoji=False)  # a path may have brackets and colons
    reached = already_reached(loaded)
    if reached is not None and (allocation is not None or not without_last_word(loaded.run_dir)):
        text = f"{loaded.name} has reached its target: step {reached} of {loaded.train.steps} is in {loaded.run_dir}"
        console.print(text, soft_wrap=True)
        if allocation is not None:
            end_chain_at_target(loaded, allocation, reached)
        return Exit.OK
    display = Display(loaded.logging.progress, loaded.target_step, console=console, log=log)
    if allocation is not None and allocation.gone:
        display.note(f"the job has lost {', '.join(allocation.gone)}, and goes on with what is left")
    display.note(greeting(loaded, layout))
    for key, decision in () if loaded.is_script else decisions.items():
        display.note(f"{key} is {decision.value}: {decision.why}")
    for note in (*notes(config, given), *kept):
        display.note(note)
    if (uneven := throughput.advice(loaded, layout)) is not None:
        display.note(uneven)
    if not loaded.is_script:
        display.note(f"a worker that dies costs {cost_of_a_kill(loaded)}")
    explain = lambda error: str(attribute(error, config, given))  # noqa: E731
    chained = Succession.of_job(loaded, os.environ) if allocation is not None else None
    try:
        code, message, written = run_campaign(loaded, layout, display, explain, allocation, ahead, resumption)
    except ConfigError as error:
        raise attribute(error, config, given) from None
    finally:
        display.close()

    def say(text: str) -> None:
        log.note(text)
        console.print(text, soft_wrap=True)

    def warn(text: str) -> None:
        log.note(f"resilient: {text}")
        typer.echo(f"resilient: {text}", err=True)

    if message:
        warn(message)
    seen = looked_back(loaded.run_dir) if written and code in (Exit.OK, Exit.STOPPED) else None
    if code is Exit.OK:
        say(farewell(loaded, seen))
    elif code is Exit.STOPPED:
        if loaded.is_script and (saved := last_saved(seen)) is not None:
            say(saved)
    elif code is Exit.GAVE_UP:
        warn(f"`resilient logs {loaded.run_dir}` shows what the ranks printed")
    again = asyncio.run(requeue_of(os.environ)) if allocation is not None and code is Exit.STOPPED else None
    if again is not None:
        say(f"Job {again.job_id} goes back into the queue, and goes on from here.")
    elif (last := sequel(code, waiting_behind(chained))) is not None:
        say(last)
    drain()  # driver.log has, too, what has become of these words
    log.finish(loaded.run_dir)
    if again is not None:
        asyncio.run(ask_for(again))
    return code


def _must_be_allowed(ranks: int, *, checked: bool) -> None:
    """So many ranks, all on this machine, may have the processes and files that they need. Raises EnvironmentUnusable.

    Args:
        checked: nodes are. Where they are not, fewer files than are advised may do.
    """
    descriptors.raise_limit()  # what this process may have, all that it starts may have
    limits = machine.limits_of()
    too_few = [machine.too_few_files(limits, ranks) if checked else None, machine.too_few_processes(limits, ranks)]
    if found := [each for each in too_few if each is not None]:
        raise EnvironmentUnusable(f"{socket.gethostname()}: {'; '.join(found)}")


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("asyncio").setLevel(logging.WARNING)
