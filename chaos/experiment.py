"""An experiment as typed models: which campaign is broken, how, when, and how much of it.

Owns the shape of the file and its errors.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from chaos import faults
from chaos.fault import Aim, Fault
from chaos.moments import Phase
from resilient.exits import Exit, ForeseenError


class ExperimentError(ForeseenError):
    """An experiment that cannot be: file, key, what is allowed."""

    code = Exit.CONFIG


class Section(BaseModel):
    """Base of all sections: a key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class When(Section):
    """When a fault strikes: of `step`, `s` (after the steady state) and `after` the latest; then `phase`.

    `after`: id of another fault of the schedule; it strikes once that one was injected, with `phase: recovery` while it is
    recovered from, with `recovered: true` once the run goes on. `together`: at the same time as that one.
    """

    step: Annotated[int, Field(ge=1)] | None = None
    s: Annotated[float, Field(ge=0)] | None = None
    phase: Phase | None = None
    after: str | None = None
    together: str | None = None
    recovered: bool = False


class Scheduled(Section):
    """One fault. `target`: `rank: 1`, `node: 0`, `random`, or `culprit` (whoever the last fault was blamed on)."""

    fault: str
    id: str | None = None
    at: When = When()
    target: dict[Literal["rank", "node"], Annotated[int, Field(ge=0)]] | Literal["random", "culprit"] = "random"
    params: dict[str, Any] = Field({}, alias="with")

    @field_validator("fault")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in faults.names():
            raise ValueError(f"there is no fault {name!r}; there are {', '.join(faults.names())}")
        return name

    @model_validator(mode="after")
    def _fits(self) -> "Scheduled":
        self.made()
        return self

    def made(self) -> Fault:
        """The fault with its parameters."""
        return faults.kind(self.fault)(**self.params)


class Mix(Section):
    """Faults at random: kinds with weights, one after another, each when the run has gone on for `calm_s` after the last one."""

    seed: int = 0
    count: Annotated[int, Field(ge=1)] | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None
    calm_s: tuple[float, float] = (1.0, 5.0)
    kinds: dict[str, float | dict[str, Any]]  # name -> weight, or {weight, with, at}
    nested: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of faults that another one follows during recovery


class Limits(Section):
    """How much may be broken: the blast radius."""

    faults: Annotated[int, Field(ge=1)] = 1000
    at_once: Annotated[int, Field(ge=1)] = 2
    nodes: Annotated[int, Field(ge=1)] | None = None  # different ones, over the whole experiment
    minutes: Annotated[float, Field(gt=0)] = 60.0


class LabSpec(Section):
    """Hosts to run on; without, all is on this machine, or in the job of Slurm that it is called from."""

    hosts: Annotated[int, Field(ge=1)] = 4


class Campaign(Section):
    """What is run: a config's file, relative to the experiment's, with changes; or the whole config."""

    file: Path | None = None
    config: dict[str, Any] = {}


class Experiment(Section):
    """A whole experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    about: str = ""
    campaign: Campaign
    lab: LabSpec | None = None
    steady_steps: Annotated[int, Field(ge=1)] = 10
    faults: list[Scheduled] = []
    random: Mix | None = None
    limits: Limits = Limits()
    twin: bool = True
    tolerance: float = 0.0  # of losses, relative, where a fault is not exact

    @model_validator(mode="after")
    def _something_to_do(self) -> "Experiment":
        if not self.faults and self.random is None:
            raise ValueError("there is neither a fault in `faults` nor a mix in `random`")
        return self


def read(path: Path) -> Experiment:
    """An experiment from its file.

    Raises:
        ExperimentError: it is not there, is not YAML, or says what cannot be.
    """
    try:
        return Experiment.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise ExperimentError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path}: not YAML: {error}") from None
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ExperimentError("\n".join(lines)) from None


__all__ = ["Aim", "Experiment", "ExperimentError", "Limits", "Mix", "Scheduled", "When", "read"]
