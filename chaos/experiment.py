"""An experiment as typed models: which campaign is broken, how, when, and how much of it.

Owns the shape of the file and its errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from chaos import faults
from chaos.fault import Fault
from chaos.injectors.moments import Phase
from chaos.orchestration.volumes import Volume
from resilient.config.annotations import allowed, keys_of, walk
from resilient.config.errors import ConfigError, Problem
from resilient.config.source import MOST, REPORTED, Source, attributed, in_words, ordered, parse, reported

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
SHIPPED = Path(__file__).parent / "experiments"  # a link in the source tree, so that an installation has them too


class ExperimentError(ConfigError):
    """An experiment that cannot be: file, line, key, value, what is allowed."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        super().__init__([Problem("", None, problems)] if isinstance(problems, str) else problems)


class Misfit(ValueError):
    """What a section says does not fit together. The keys of its problems are relative to the section."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class Section(BaseModel):
    """Base of all sections: a key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class When(Section):
    """When a fault strikes: of `step`, `s` (after the steady state) and `after` the latest; then `phase`.

    Faults strike one after the other, as they are written, each once the run goes on after the one before. So that two meet:
    `after` is the id of another one, and this one strikes once that one was injected, with `phase: recovery` while it is recovered
    from (`recovered: true`: as if it were not named). `together`: at the same time as that one.
    """

    step: int | None = Field(None, ge=1, description="once this optimizer step was finished")
    s: float | None = Field(None, ge=0, description="so many seconds after the steady state")
    phase: Phase | None = Field(
        None, description="once the target is in it; for `flush`, `recovery` and `drain`, once the campaign is"
    )
    after: str | None = Field(None, description="the id of a fault above it; this one strikes once that one was injected")
    together: str | None = Field(None, description="the id of a fault above it; this one strikes in the same moment")
    recovered: bool = Field(False, description="wait until the one of `after` was recovered from")


class Scheduled(Section):
    """One fault. `target`: `rank: 1`, `node: 0`, `random`, or `culprit` (whoever the last fault was blamed on)."""

    fault: str = Field(description="its name in the catalogue")
    id: Annotated[str, Field(pattern=NAME)] | None = Field(None, description="by which others name it; unset: number and fault")
    at: When = Field(When(), description="when it strikes; unset: once the run goes on after the one before")
    target: dict[Literal["rank", "node"], Annotated[int, Field(ge=0)]] | Literal["random", "culprit"] = Field(
        "random", description="whom it hits; ignored by faults that are aimed at neither"
    )
    params: dict[str, Any] = Field({}, alias="with", description="the parameters of the fault")

    @model_validator(mode="after")
    def _fits(self) -> "Scheduled":
        make(self.fault, self.params)
        if self.at.after is not None and self.at.together is not None:
            raise Misfit(Problem("at", None, "`after` one and `together` with one cannot both be"))
        return self


class Kind(Section):
    """One kind of a mix: how often it is drawn, against the others; its parameters; in which phase it strikes."""

    weight: float = Field(1.0, gt=0, description="how often it is drawn, against the others")
    params: dict[str, Any] = Field({}, alias="with", description="the parameters of the fault")
    phase: Phase | None = Field(None, description="in which it strikes; unset: whenever its turn comes")


class Mix(Section):
    """Faults at random: kinds with weights, one after another, each when the run has gone on for `calm_s` after the last one.

    Until there were `count`, or for so many `minutes`, or until the campaign ends. `nested`: share of faults that another one
    follows while they are recovered from.
    """

    seed: int = Field(0, description="of everything that is drawn; `--seed` overrides it")
    count: int | None = Field(None, ge=1, description="faults until it ends")
    minutes: float | None = Field(None, gt=0, description="from the first of them on until it ends; `--minutes` overrides it")
    calm_s: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = Field(
        (1.0, 5.0), description="shortest and longest time between a recovery and the next fault"
    )
    kinds: dict[str, Kind] = Field(min_length=1, description="by the name of the fault; a number alone is its weight")
    nested: float = Field(0.0, ge=0, le=1, description="share of the faults that another one follows in their recovery")

    @field_validator("kinds", mode="before")
    @classmethod
    def _weights(cls, kinds: Any) -> Any:
        if not isinstance(kinds, dict):
            return kinds
        return {name: {"weight": kind} if isinstance(kind, int | float) else kind for name, kind in kinds.items()}

    @model_validator(mode="after")
    def _fits(self) -> "Mix":
        for name, kind in self.kinds.items():
            try:
                make(name, kind.params)
            except Misfit as error:
                raise Misfit(*(_of_kind(name, each) for each in error.problems)) from None
        if self.calm_s[0] > self.calm_s[1]:
            raise Misfit(Problem("calm_s", list(self.calm_s), "shortest and longest, in this order"))
        return self


def _of_kind(name: str, problem: Problem) -> Problem:
    """A problem of a fault in a mix, which has its name for a key."""
    if problem.key == "fault":
        return replace(problem, key=f"kinds.{name}", value=None)
    return replace(problem, key=f"kinds.{name}.{problem.key}")


class Limits(Section):
    """How much may be broken: the blast radius."""

    faults: int = Field(1000, ge=1, description="that are injected in all")
    at_once: int = Field(2, ge=1, description="that are not recovered from yet")
    nodes: int | None = Field(None, ge=1, description="different ones that are hit, spares among them; unset: all may be")
    minutes: float = Field(60.0, gt=0, description="that the experiment may take, and as many its reference run")
    recovery_s: float = Field(180.0, gt=0, description="from a fault, or its end, until the run goes on")


class LabSpec(Section):
    """Hosts to run on; without, all is on this machine, or in the job of Slurm that it is called from."""

    hosts: int = Field(4, ge=1, description="network namespaces with private RAM and NVMe")


class Campaign(Section):
    """What is run: a config's file, relative to the experiment's, with changes; or the whole config.

    `until: faults`: it is stopped once all faults were injected, and what it has reached then is its target. So an experiment does
    not depend on how fast a machine is.
    `volumes`: file systems of its own that are mounted for it (as root); the config has them as `${volume.NAME}`. The one that is
    called `run_dir` is mounted at the run directory.
    """

    file: Path | None = Field(None, description="of a config, relative to the experiment's")
    config: dict[str, Any] = Field({}, description="changes to it, or the whole config")
    until: Literal["target", "faults"] = Field("target", description="what ends it")
    volumes: dict[Annotated[str, Field(pattern=NAME)], Volume] = Field({}, description="file systems by name, mounted as root")


class Experiment(Section):
    """A whole experiment."""

    name: str = Field(pattern=NAME, description="of the directory of results and in the verdict")
    about: str = Field("", description="one line for people")
    campaign: Campaign = Field(description="what is broken")
    lab: LabSpec | None = Field(None, description="hosts to run on, as root; unset: this machine, or this job of Slurm")
    steady_steps: int = Field(10, ge=1, description="steps that are watched before anything is broken")
    faults: list[Scheduled] = Field([], description="one after the other")
    random: Mix | None = Field(None, description="faults at random, after those of `faults`")
    limits: Limits = Field(Limits(), description="the blast radius")
    reference: bool = Field(True, description="run the campaign without faults too, and compare losses and weights")
    tolerance: float = Field(0.0, ge=0, description="of losses, relative, from the first fault on that is not exact")

    @model_validator(mode="after")
    def _makes_sense(self) -> "Experiment":
        endless = self.random is not None and self.random.count is None and self.random.minutes is None
        if endless and self.campaign.until == "faults":
            raise Misfit(Problem("campaign.until", "faults", "random.count or random.minutes does not say how many"))
        if not self.faults and self.random is None:
            raise Misfit(Problem("", None, "there is neither a fault in `faults` nor a mix in `random`"))
        if self.lab is not None and self.campaign.volumes:
            raise Misfit(Problem("campaign.volumes", None, "hosts of a lab have /mnt/nvme and /dev/shm of their own instead"))
        known: set[str] = set()
        for number, each in enumerate(self.faults):
            for key, other in (("after", each.at.after), ("together", each.at.together)):
                if other is not None and other not in known:
                    raise Misfit(Problem(f"faults.{number}.at.{key}", other, "no fault above it has this id"))
            if each.id in known:
                raise Misfit(Problem(f"faults.{number}.id", each.id, "stands twice"))
            known |= {each.id} if each.id is not None else set()
        return self


def make(name: str, params: Mapping[str, Any]) -> Fault:
    """A fault with its parameters.

    Raises:
        Misfit: there is none of this name, or it has no such parameters; with the keys `fault` and `with`.
    """
    if name not in faults.names():
        raise Misfit(Problem("fault", name, f"there is no such fault; allowed: {', '.join(faults.names())}"))
    kind = faults.kind(name)
    try:
        return kind(**params)
    except ValidationError as error:
        raise Misfit(*(_of_parameter(kind, params, each["loc"], each["type"]) for each in error.errors())) from None


def _of_parameter(kind: type[Fault], params: Mapping[str, Any], loc: Sequence[str | int], what: str) -> Problem:
    key, annotation, field = walk(loc, kind)
    at = ".".join(("with", *key))
    if what == "extra_forbidden":
        return Problem(at, None, f"unknown parameter; allowed here: {', '.join(keys_of(kind)) or 'none'}")
    if what == "missing":
        return Problem(at, None, "is missing")
    return Problem(at, params.get(key[0]), f"allowed: {allowed(annotation, field)}{', and finite' * (what == 'finite_number')}")


def find(named: str) -> Path:
    """The file of an experiment: one that is there, or one of those that are shipped, by its name.

    Raises:
        ExperimentError: there is neither.
    """
    path = Path(named)
    if path.suffix or (path.exists() and not path.is_dir()):
        return path
    shipped = {each.stem: each for each in sorted(SHIPPED.glob("*.yaml"))}
    if named not in shipped:
        raise ExperimentError(f"{named}: there is no such file; experiments that come along: {', '.join(shipped) or 'none'}")
    return shipped[named]


def read(path: Path) -> Experiment:
    """An experiment from its file.

    Raises:
        ExperimentError: it is not there, is not YAML, or says what cannot be.
    """
    source = _parse(path)
    try:
        return Experiment.model_validate(source.values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems = [problem for each in found[: MOST * REPORTED] for problem in _in_words(source, dict(each))]
        raise ExperimentError(reported(ordered(problems))) from None


def _parse(path: Path) -> Source:
    try:
        return parse(path, "an experiment")
    except ConfigError as error:
        raise ExperimentError(error.problems) from None


def _in_words(source: Source, found: Mapping[str, Any]) -> Iterator[Problem]:
    cause = found.get("ctx", {}).get("error")
    if not isinstance(cause, Misfit):
        yield in_words(source, found, Experiment)
        return
    at = ".".join(map(str, found["loc"]))
    for each in cause.problems:
        yield attributed(source, replace(each, key=".".join(filter(None, (at, each.key)))))


@contextmanager
def located(path: Path) -> Iterator[None]:
    """What turns out to be wrong with the experiment of a file is told with the file and the line."""
    try:
        yield
    except ExperimentError as error:
        source = _parse(path)
        raise ExperimentError([attributed(source, problem) for problem in error.problems]) from None


def lasting(experiment: Experiment, minutes: float | None) -> Experiment:
    """The experiment with a mix that goes on for so long.

    Raises:
        ExperimentError: it has none.
    """
    if minutes is None:
        return experiment
    if experiment.random is None:
        raise ExperimentError(f"{experiment.name} has no random mix, so that --minutes does not say anything")
    mix = experiment.random.model_copy(update={"minutes": minutes, "count": None})
    limits = experiment.limits.model_copy(update={"minutes": max(experiment.limits.minutes, 2 * minutes + 10)})
    campaign = experiment.campaign.model_copy(update={"until": "faults"})
    return experiment.model_copy(update={"random": mix, "limits": limits, "campaign": campaign})


def seed_of(experiment: Experiment, wanted: int | None) -> int:
    """The seed: the one that is wanted, or that of the mix."""
    if wanted is not None:
        return wanted
    return experiment.random.seed if experiment.random is not None else 0
