"""The batch script of a chain's jobs, and the name by which they are one chain. Pure."""

import hashlib
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from resilient.config import Config, ConfigError, Problem
from resilient.config.timeouts import timeouts
from resilient.slurm.container import batch_lines
from resilient.slurm.deadline import lead_s
from resilient.slurm.options import in_script

FILE = "job.sh"
CHAIN_VARIABLE = "RESILIENT_CHAIN"  # from the batch script to the driver: the run directory, also where the config cannot be read
_NOT_OF_A_CHAIN = {
    "job-name": "its jobs are found by their name; set `name`, with which that begins",
    "array": "one job runs and one waits behind it; submit a config for each, with a run_dir of its own",
    "wait": "its jobs are submitted by jobs, which cannot wait for their end",
}
SIGNAL_MAX_S = 65535  # that Slurm takes


def job_name(config: Config, run_dir: Path) -> str:
    """The name of every job that writes to a run directory, and of no other.

    Args:
        run_dir: without links, so that all ways to it lead to one name.
    """
    return f"{config.name}{_end_of_name(run_dir)}"


def is_job_of(name: str, run_dir: Path) -> bool:
    """Whether a job of this name is one that writes to a run directory, whatever the campaign was called then.

    Args:
        run_dir: as for `job_name`.
    """
    return name.endswith(_end_of_name(run_dir))


def _end_of_name(run_dir: Path) -> str:
    return f"-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"


def script(
    config: Config, run_dir: Path, *, arguments: Sequence[str], python: str, directory: Path, name: str | None = None
) -> str:
    """The text.

    Args:
        run_dir: as for `job_name`.
        arguments: of `resilient run`.
        python: that submits.
        directory: that relative paths start from.
        name: of the jobs; None: their `job_name`.

    Raises:
        ConfigError: it does not say how many nodes to ask for, or wants none but this machine, or `slurm.extra` asks for what
            breaks a chain.
    """
    if config.cluster.nodes == "auto":
        message = "a job is to be asked for, and must know of how many nodes; allowed: a number"
        raise ConfigError([Problem("cluster.nodes", "auto", message)])
    if config.cluster.launcher == "local":
        raise ConfigError([Problem("cluster.launcher", "local", "a job's agents run on its nodes; allowed: auto, slurm")])
    slurm = config.slurm
    if why := _breaks_a_chain(slurm.extra):
        raise ConfigError([Problem("slurm.extra", slurm.extra, why)])
    asked = None if slurm.signal_lead_s == "auto" else slurm.signal_lead_s
    time_s = None if slurm.minutes is None else 60.0 * slurm.minutes
    lead = min(SIGNAL_MAX_S, math.ceil(lead_s(asked, drain_s=timeouts(config).drain_s, time_s=time_s)))
    given = {
        "job-name": name or job_name(config, run_dir),
        "nodes": config.cluster.slots,
        "ntasks-per-node": 1,
        "cpus-per-task": slurm.cpus_per_node,
        "gres": slurm.gres,
        "gpus-per-node": slurm.gpus_per_node,
        "time": slurm.minutes,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "chdir": directory,
        "output": f"{_literal(run_dir)}/logs/job-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{lead}",
    }
    options = [f"--{name}={_quoted(str(value))}" for name, value in given.items() if value is not None]
    options += ["--no-kill", "--requeue" if slurm.requeue else "--no-requeue", *slurm.extra]
    command = ["-m", "resilient", "run", *arguments]
    container = slurm.container
    if container is not None and container.driver:
        last = batch_lines(config, container, [container.python, *command], run_dir, directory)
    else:
        first = "# In the shell's place, so that signals reach it and its exit code is the job's."
        last = [first, f"exec {shlex.join([slurm.python or python, *command])}"]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            "# Written by `resilient submit`, and submitted again by each job for its successor.",
            *([f"module load {shlex.join(slurm.modules)}"] if slurm.modules else []),
            *slurm.setup,
            f"export {CHAIN_VARIABLE}={shlex.quote(str(run_dir))}",
            "",
            *last,
            "",
        ]
    )


def _breaks_a_chain(extra: Sequence[str]) -> str:
    """What of these options keeps the jobs from being one chain, and what to do; nothing where they may stand."""
    given = in_script("\n".join(f"#SBATCH {line}" for line in extra))
    for name, instead in _NOT_OF_A_CHAIN.items():
        if name in given:
            return f"--{name} would break the chain: {instead}"
    if any("?" in value for value in given.get("dependency", ())):
        return "a --dependency with ? goes not together with the chain's own, singleton; allowed: conditions with commas between"
    return ""


def _literal(path: Path) -> str:
    """A path in which sbatch puts nothing in the place of a percent sign."""
    return str(path).replace("%", "%%")


def _quoted(text: str) -> str:
    """As sbatch reads words of a line."""
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
