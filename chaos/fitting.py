"""Whether an experiment fits the campaign that it is to break: steps that come, tiers that are there. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from chaos import faults
from chaos.experiment import Experiment, ExperimentError
from resilient.config import Config
from resilient.config.errors import Problem


def fit(experiment: Experiment, config: Config) -> None:
    """See that each fault can strike.

    Raises:
        ExperimentError: one cannot, whatever happens.
    """
    problems = [*_steps(experiment, config.target_step), *_tiers(experiment, [tier.name for tier in config.checkpoint.tiers])]
    if problems:
        raise ExperimentError(problems)


def _steps(experiment: Experiment, target_step: int | None) -> Iterator[Problem]:
    if target_step is None:  # only a script knows
        return
    if experiment.steady_steps >= target_step:
        allowed = f"allowed: below {target_step}, the step with which the campaign ends"
        yield Problem("steady_steps", experiment.steady_steps, allowed)
    for number, each in enumerate(experiment.faults):
        if each.at.step is not None and each.at.step > target_step:
            allowed = f"allowed: up to {target_step}, the step with which the campaign ends"
            yield Problem(f"faults.{number}.at.step", each.at.step, allowed)


def _tiers(experiment: Experiment, names: list[str]) -> Iterator[Problem]:
    """Args: names: in the order of the config, of which the last one is durable."""
    for number, each in enumerate(experiment.faults):
        yield from _tier(f"faults.{number}.with.tier", each.fault, each.params, names)
    for name, kind in (experiment.random.kinds if experiment.random is not None else {}).items():
        yield from _tier(f"random.kinds.{name}.with.tier", name, kind.params, names)


def _tier(key: str, name: str, params: Mapping[str, Any], names: list[str]) -> Iterator[Problem]:
    kind = faults.kind(name)
    wanted = params.get("tier")
    if wanted is None:  # its default is of a kind that every campaign has
        return
    taken = {"durable", names[-1]} if "durable" in kind.not_tiers else set()
    taken |= {"memory"} & kind.not_tiers
    there = [each for each in dict.fromkeys(["memory", *names, "durable"]) if each not in taken]
    if wanted not in there and not (wanted == "node" and len(names) > 1):  # a kind, too
        yield Problem(key, wanted, f"allowed: {', '.join(there)}")
