"""The config as typed models: every key, its type, its default and its range.

Owns the shape of a config and nothing else: what each section may say is in `sections`, reading files is `source`, checks across
sections are `checks`. Unknown keys are refused. All models are frozen: a running campaign cannot change under its own feet.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from resilient.config.fields import Section, not_empty
from resilient.config.sections.fault_tolerance import Chaos, Checkpoint, Resilience
from resilient.config.sections.logging import Logging
from resilient.config.sections.machines import Cluster, Network, Slurm
from resilient.config.sections.training import Data, Model, Optimizer, Parallel, Train


class Config(Section):
    """A whole campaign. `load` makes one from a file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    run_dir: Annotated[Path, BeforeValidator(not_empty)] = Path("runs/${name}")
    run_dir_mode: Literal["private", "group"] = Field(
        "private",
        description="private: what a run makes is its user's alone (0700, files 0600); group: its group may read it (0750, 0640), "
        "and control files that members of the user's groups have written are trusted",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 42
    entrypoint: Annotated[str, Field(pattern=r"^(?s:[A-Za-z_][\w.]*:[A-Za-z_]\w*|-m [A-Za-z_][\w.]*( .*)?|.+\.py\b.*)$")] = Field(
        "trainer.main:train",
        description="module:function that every rank calls, or a script with its arguments, or -m and a module with its arguments, "
        "in which `${name}` and `${run_dir}` are replaced",
    )
    args: dict[str, Any] = Field({}, description="free values for an entry point of your own")
    cluster: Cluster = Cluster()
    parallel: Parallel = Parallel()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    resilience: Resilience = Resilience()
    network: Network = Network()
    slurm: Slurm = Slurm()
    chaos: Chaos = Chaos()
    logging: Logging = Logging()

    @property
    def is_script(self) -> bool:
        """Whether every rank runs a script or a module as a program, which knows no config."""
        return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.entrypoint) is None

    @property
    def target_step(self) -> int | None:
        """The step at which the campaign is done; None where only the script knows."""
        return None if self.is_script and "steps" not in self.train.model_fields_set else self.train.steps
