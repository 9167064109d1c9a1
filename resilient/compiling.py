"""What `train.compile: auto` comes to: on for ranks on GPUs, off on CPUs.

Compiling fuses what is not a matrix product, which costs a GPU the memory traffic of every operation by itself, and a CPU less than
the compiling: a minute before the first step. The decision is a pure function of what the machine and the config tell; torch is not
loaded. A run directory keeps what was decided when its campaign began: compiled layers round otherwise.
"""

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from resilient.campaign import gpu_count
from resilient.config import Config, against_compiling, document

COMPILERS = ("gcc", "clang", "cc")


@dataclass(frozen=True)
class Choice:
    """Whether layers are compiled, and in a few words why."""

    compile: bool
    why: str


def choose(config: Config, *, gpus: int, builds: bool) -> Choice:
    """Whether it pays, and whether it can be done at all. Pure.

    Args:
        gpus: NVIDIA GPUs that ranks compute on; 0: they compute on the CPU.
        builds: there is what Triton builds its launchers with: a C compiler and Python's headers.
    """
    if not gpus:
        return Choice(False, "ranks compute on CPUs, where the first step would take longer than is gained")
    if (refusal := against_compiling(config)) is not None:
        return Choice(False, refusal)
    if config.parallel.cp > 1:
        return Choice(False, "compiled layers have not been tried with context parallelism")
    if not builds:
        return Choice(False, "there is no C compiler or no Python.h, which Triton needs")
    return Choice(True, "ranks compute on GPUs")


def settled(config: Config) -> tuple[Config, Choice | None]:
    """The config with its compiling decided, and the choice where that was left to this machine.

    What stands in the config of the run directory is kept; nodes of a job are taken to be like this one.
    """
    if config.train.compile != "auto":
        return config, None
    choice = _kept(config.run_dir) or _chosen_here(config)
    if choice.compile and (refusal := against_compiling(config)) is not None:  # kept from another layout
        choice = Choice(False, refusal)
    return config.model_copy(update={"train": config.train.model_copy(update={"compile": choice.compile})}), choice


def _kept(run_dir: Path) -> Choice | None:
    match document.value_at(run_dir / "config.yaml", "train", "compile"):
        case bool() as compiled:
            return Choice(compiled, "kept from the run directory")
        case _:
            return None


def _chosen_here(config: Config) -> Choice:
    gpus = gpu_count() if config.cluster.device != "cpu" else 0
    return choose(config, gpus=gpus, builds=bool(gpus) and _builds())


def _builds() -> bool:
    compilers = [os.environ.get("CC", ""), *COMPILERS]
    return any(shutil.which(each) for each in compilers if each) and Path(sysconfig.get_path("include"), "Python.h").is_file()
