"""An experiment from its file to its end: site, campaign, reference and runner, in a directory of results.

Owns that directory, and that nothing outlives the command.
"""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from chaos.experiment import Experiment, ExperimentError
from chaos.fault import Need
from chaos.fitting import fit
from chaos.orchestration.campaign import REFERENCE, Campaign, resolve, shortened
from chaos.orchestration.cleanup import CleanupGuard
from chaos.orchestration.runner import POLL_S, Display, Outcome, Runner, Terms
from chaos.orchestration.sites import Here, InLab, Site, place, rights
from chaos.orchestration.volumes import mount, undoing
from chaos.planning import Plan, World, plan
from chaos.verdict import page, report
from chaos.verdict.gathering import inspect, observe, places
from chaos.verdict.observation import Observation
from chaos.verdict.verdict import OF_EACH, Check, Verdict, judge
from resilient.campaign import machine_layout
from resilient.config import Config, load
from resilient.config.errors import Problem
from resilient.driver.lease import holder
from resilient.exits import EnvironmentUnusable, Exit
from resilient.interruption import interruptible

RESULTS = Path("runs/chaos")
UNDONE = "everything is undone"  # what is told of an experiment that is stopped
STOP_S = 30.0  # for a campaign to stop at its next step; then it is killed


@dataclass(frozen=True)
class Result:
    """What has come of an experiment; `reference`: run directory of the campaign without faults."""

    directory: Path
    verdict: Verdict
    reference: Path | None = None


def world_of(config: Config, has: frozenset[Need]) -> World:
    """What a campaign of this config consists of here."""
    layout = machine_layout(config)
    return World(layout.nodes, layout.procs_per_node, has)


def has_here(experiment: Experiment, config: Config) -> frozenset[Need]:
    """What will be at hand where the experiment runs, as far as can be told before."""
    if experiment.lab is None:
        return place(config).has
    from chaos.lab.needs import missing

    found = rights() | ({Need.ONE_MACHINE} if experiment.lab.hosts == 1 else frozenset())
    return found if missing(slurm=True) else found | {Need.LAB, Need.SLURM}


def fresh(results: Path, name: str) -> Path:
    """A directory of this name that is not there yet, or one with a number after it."""
    for number in range(1, 10_000):
        path = results / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise EnvironmentUnusable(f"{results}: there are too many results of {name}")


def given(directory: Path) -> Path:
    """A directory for results that somebody asks for: it must be empty, or not there."""
    if directory.exists() and any(directory.iterdir()):
        raise EnvironmentUnusable(f"{directory} is not empty; results need a directory of their own")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def perform(experiment: Experiment, file: Path, seed: int, directory: Path, reference: Path | None, display: Display) -> Result:
    """Run an experiment on a campaign of its own.

    Args:
        directory: for everything that is written.
        reference: run directory of the campaign without faults, if there is one already.

    Raises:
        ForeseenError: it cannot be run here, or somebody wants its end.
    """
    shutil.copy(file, directory / "experiment.yaml")
    volumes = experiment.campaign.volumes
    with interruptible(UNDONE), CleanupGuard(undoing(volumes, directory)) as cleanup:
        mount(volumes, directory)
        config = resolve(experiment.campaign, file, directory, allow=True)
        fit(experiment, config)
        cleanup.run(config.run_dir)
        site = _site(experiment, config, cleanup, display)
        made = _planned(experiment, seed, config, site, display)
        terms = _terms(experiment, own=True)
        if experiment.reference and reference is None and terms.to_target:
            reference = _reference(experiment, file, directory, site, cleanup, display)
        campaign = Campaign(config, directory, site, cleanup.campaign())
        many = f"{len(made.strikes)} faults" if terms.minutes is None else f"faults for {terms.minutes:g} minutes"
        display.note(f"{experiment.name}, seed {seed}: {many}, in {directory}")
        before, began = inspect(places(config), site.hosts()), time.monotonic()
        runner = Runner(made, campaign, site, terms, display, cleanup.injector())
        outcome = runner.run()
        wall_s = time.monotonic() - began
        display.note(outcome.why)
        _end(campaign, cleanup)
        if experiment.reference and not terms.to_target and outcome.finished:
            changes = None if outcome.target is None else shortened(config, outcome.target)
            reference = _reference(experiment, file, directory, site, cleanup, display, changes)
        display.note("gathering what is there for the verdict")
        seen = observe(
            config.run_dir,
            campaign.jobs,
            before,
            experiment=experiment.name,
            injections=runner.injections,
            left_out=runner.left_out,
            seed=seed,
            reference=reference,
            tolerance=experiment.tolerance,
            wall_s=wall_s,
            hosts=site.hosts(),
        )
        seen = seen if outcome.target is None else replace(seen, target_step=outcome.target)
        return _judged(seen, judge(seen), directory, reference)


def attach(experiment: Experiment, seed: int, run_dir: Path, directory: Path, display: Display) -> Result:
    """Run an experiment on a campaign that runs already.

    Raises:
        ExperimentError: the campaign does not allow it.
        EnvironmentUnusable: it does not run, or not here.
    """
    path = run_dir / "config.yaml"
    config = load(path, [])
    if not config.chaos.allow:
        message = "only a campaign whose config says `chaos: {allow: true}` is broken"
        raise ExperimentError([Problem("chaos.allow", False, message, path)])
    fit(experiment, config)
    if holder(run_dir) is None:
        raise EnvironmentUnusable(f"nothing runs in {run_dir}")
    with interruptible(UNDONE), CleanupGuard() as cleanup:
        site = place(config)
        campaign = Campaign(config, directory, site, {})
        made = _planned(experiment, seed, config, site, display)
        terms = _terms(experiment, own=False)
        runner = Runner(made, campaign, site, terms, display, cleanup.injector())
        outcome = runner.run()
        display.note(outcome.why)
        seen = observe(
            run_dir, (), {}, experiment=experiment.name, injections=runner.injections, left_out=runner.left_out, seed=seed
        )
        return _judged(seen, _of_one_that_goes_on(judge(seen), outcome), directory)


def _of_one_that_goes_on(found: Verdict, outcome: Outcome) -> Verdict:
    """What can be judged of a campaign before its end: what was done to it, and that it has lived through that."""
    checks = [check for check in found.checks if check.name in OF_EACH]
    return replace(found, checks=[*checks, Check("reached", outcome.finished, outcome.why)])


def _planned(experiment: Experiment, seed: int, config: Config, site: Site, display: Display) -> Plan:
    """What will be done; what is left out of it is said.

    Raises:
        EnvironmentUnusable: all is.
    """
    made = plan(experiment, seed, world_of(config, site.has))
    if not made.groups:
        raise EnvironmentUnusable(f"nothing can be injected here: {'; '.join(map(': '.join, made.left_out.items()))}")
    for name, why in made.left_out.items():
        display.note(f"left out: {name}: {why}")
    return made


def _judged(seen: Observation, verdict: Verdict, directory: Path, reference: Path | None = None) -> Result:
    """The result, written down."""
    report.save(verdict, directory)
    page.save(seen, verdict, directory)
    return Result(directory, verdict, reference)


def _terms(experiment: Experiment, *, own: bool) -> Terms:
    minutes = experiment.random.minutes if experiment.random is not None else None
    to_target = experiment.campaign.until == "target"
    return Terms(experiment.limits, experiment.steady_steps, minutes, to_target, own)


def _site(experiment: Experiment, config: Config, cleanup: CleanupGuard, display: Display) -> Site:
    if experiment.lab is None:
        return place(config)
    from chaos.lab.lab import Lab
    from chaos.lab.needs import demand
    from chaos.lab.shape import LabPaths

    demand(slurm=True)
    lab = Lab(LabPaths(f"chaos{os.getpid()}"))
    cleanup.lab(lab.paths.name)
    display.note(f"a lab of {experiment.lab.hosts} hosts comes up")
    return InLab.up(lab, experiment.lab.hosts)


def _end(campaign: Campaign, cleanup: CleanupGuard) -> None:
    """See to it that a campaign which did not end by itself is over."""
    if campaign.jobs and campaign.ended() is not None:
        return
    campaign.stop()
    deadline = time.monotonic() + STOP_S
    while campaign.ended() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    cleanup.end_campaigns()
    while campaign.ended() is None and time.monotonic() < deadline + STOP_S:
        time.sleep(POLL_S)


def _reference(
    experiment: Experiment,
    file: Path,
    directory: Path,
    site: Site,
    cleanup: CleanupGuard,
    display: Display,
    changes: Mapping[str, Mapping[str, object]] | None = None,
) -> Path:
    """The same campaign without faults, changed so; its run directory. In the place of a lab it runs on this machine.

    Raises:
        EnvironmentUnusable: it does not reach its target, or not within the time that the experiment may take.
    """
    changes = dict(changes or {})
    if site.lab:
        changes["cluster"] = {"launcher": "local"}
        site = Here()
    config = resolve(experiment.campaign, file, directory / REFERENCE, allow=False, changes=changes)
    cleanup.run(config.run_dir)
    reference = Campaign(config, directory / REFERENCE, site, cleanup.campaign())
    display.note(f"the reference run without faults runs to step {config.train.steps}")
    reference.start()
    minutes = experiment.limits.minutes
    deadline = time.monotonic() + 60 * minutes
    while (code := reference.ended()) is None:
        if time.monotonic() > deadline:
            _end(reference, cleanup)
            why = f"the reference run does not reach step {config.train.steps} within {minutes:g} minutes (limits.minutes)"
            raise EnvironmentUnusable(f"{why}:\n{reference.last_words()}")
        time.sleep(POLL_S)
    if code != Exit.OK:
        raise EnvironmentUnusable(f"the campaign does not reach its target even without faults:\n{reference.last_words()}")
    return config.run_dir
