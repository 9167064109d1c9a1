"""Several clusters behind one machine: a chain lives on the machine's own, which alone Slurm's commands are asked about. Pure."""

from collections.abc import Mapping

from resilient.config.errors import ENVIRONMENT, Problem
from resilient.slurm.options import in_script

_OPTIONS = ("clusters", "cluster")
_VARIABLES = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")  # the first of them wins


def wanted(script: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The cluster that a batch script is for and the option or variable that says so; None where nothing does."""
    given = in_script(script)
    for name in _OPTIONS:
        if name in given:
            return name, given[name][-1]
    return next(((name, environ[name]) for name in _VARIABLES if environ.get(name)), None)


def elsewhere(asked: tuple[str, str], own: str) -> Problem | None:
    """What is wrong with it, if it is another cluster than that of this machine. Args: asked: as from `wanted`."""
    name, cluster = asked
    if not own or cluster.lower() == own.lower():
        return None
    here = f"Slurm on this machine is of the cluster {own}, and a chain's jobs would be looked for there"
    why = f"{here}; submit on a machine of {cluster}"
    if name in _OPTIONS:
        return Problem("slurm.extra", f"--{name}={cluster}", why)
    return Problem(name, cluster, why, line=ENVIRONMENT)
