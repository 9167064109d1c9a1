"""The allocation that this process runs in, as Slurm's environment tells it."""

from collections.abc import Mapping
from dataclasses import dataclass

from resilient.exits import EnvironmentUnusable
from resilient.slurm.hosts import counts, expand

JOB = "SLURM_JOB_ID"


@dataclass(frozen=True)
class Allocation:
    """A job's nodes.

    Attributes:
        hosts: names, the batch host first.
        cpus: that the job has on each of them, in the same order.
        task: number of this process in the srun step that it was started with; 0 in a batch script.
    """

    job_id: str
    hosts: tuple[str, ...]
    cpus: tuple[int, ...]
    task: int

    @classmethod
    def of(cls, environ: Mapping[str, str], own: str) -> "Allocation":
        """The allocation that these variables tell of.

        Args:
            own: name of this host; Slurm's name for it is looked for first.

        Raises:
            EnvironmentUnusable: they do not tell of one.
        """
        try:
            hosts = expand(environ["SLURM_JOB_NODELIST"])
            cpus = counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
            task = int(environ.get("SLURM_PROCID", "0")) if "SLURM_STEP_ID" in environ else 0
        except (KeyError, ValueError) as error:
            raise EnvironmentUnusable(f"Slurm's environment does not tell the nodes of the job: {error}") from None
        if len(cpus) == 1:
            cpus *= len(hosts)
        if len(cpus) != len(hosts) or not hosts:
            raise EnvironmentUnusable(f"Slurm names {len(hosts)} nodes, but the CPUs of {len(cpus)}")
        here = environ.get("SLURMD_NODENAME", own)
        pairs = sorted(zip(hosts, cpus, strict=True), key=lambda pair: pair[0] != here)
        return cls(environ[JOB], tuple(host for host, _ in pairs), tuple(count for _, count in pairs), task)
