"""The allocation that this process runs in, as Slurm's environment tells it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from resilient.exits import EnvironmentUnusable
from resilient.slurm.hosts import counts, expand

JOB = "SLURM_JOB_ID"
LEADER = f"{JOB}_HET_GROUP_0"  # the component of a heterogeneous job that runs its batch script
COMPONENTS = 1024  # of a heterogeneous job, at most


def own_job(environ: Mapping[str, str]) -> str:
    """The job of this process as Slurm's commands name it; "" outside of one.

    Of a task of an array: the id of one of them is that of the whole array, too. Of a component of a heterogeneous job: the first.
    """
    if (task := environ.get("SLURM_ARRAY_TASK_ID")) and (array := environ.get("SLURM_ARRAY_JOB_ID")):
        return f"{array}_{task}"
    return environ.get(LEADER) or environ.get(JOB, "")


@dataclass(frozen=True)
class Allocation:
    """A job's nodes.

    Attributes:
        hosts: names, the batch host first.
        cpus: that the job has on each of them, in the same order.
        task: number of this process in the srun step that it was started with; 0 in a batch script.
        components: of a heterogeneous job, the one that each host belongs to; empty for any other job.
        gone: nodes that the job had when it began.
    """

    job_id: str
    hosts: tuple[str, ...]
    cpus: tuple[int, ...]
    task: int
    components: tuple[int, ...] = ()
    gone: tuple[str, ...] = ()

    @classmethod
    def of(cls, environ: Mapping[str, str], own: str) -> "Allocation":
        """The allocation that these variables tell of; of a heterogeneous job, all of its components.

        Args:
            own: name of this host; Slurm's name for it is looked for first.

        Raises:
            EnvironmentUnusable: they do not tell of one.
        """
        try:
            parts = int(environ.get("SLURM_HET_SIZE", "0"))
            if not 0 <= parts <= COMPONENTS:
                raise ValueError(f"SLURM_HET_SIZE is {parts}; a job has at most {COMPONENTS} components")
            job_id = environ.get(LEADER) or environ[JOB]
            suffixes = [f"_HET_GROUP_{part}" for part in range(parts)] or [""]
            found = [
                (component, host, count)
                for component, suffix in enumerate(suffixes)
                for host, count in _nodes(
                    environ[f"SLURM_JOB_NODELIST{suffix}"], environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", "1")
                )
            ]
            task = int(environ.get("SLURM_PROCID", "0")) if "SLURM_STEP_ID" in environ else 0
        except (KeyError, ValueError) as error:
            raise EnvironmentUnusable(f"Slurm's environment does not tell the nodes of the job: {error}") from None
        here = environ.get("SLURMD_NODENAME", own)
        found.sort(key=lambda node: node[1] != here)
        components, hosts, cpus = (tuple(each) for each in zip(*found, strict=True))
        return cls(job_id, hosts, cpus, task, components if parts else ())

    def holds(self, environ: Mapping[str, str], own: str) -> bool:
        """Whether this process runs on one of the nodes, and not where salloc was called. Args: as for `of`."""
        return environ.get("SLURMD_NODENAME", own) in self.hosts

    def within(self, left: Collection[str]) -> "Allocation":
        """With those nodes only that the job still has."""
        kept = [number for number, host in enumerate(self.hosts) if host in left]
        hosts, cpus = tuple(self.hosts[number] for number in kept), tuple(self.cpus[number] for number in kept)
        components = tuple(self.components[number] for number in kept) if self.components else ()
        gone = tuple(host for host in self.hosts if host not in left)
        return replace(self, hosts=hosts, cpus=cpus, components=components, gone=gone)


def _nodes(names: str, cpus: str) -> list[tuple[str, int]]:
    """Hosts with their CPUs. Raises ValueError if the lists do not fit."""
    hosts, numbers = expand(names), counts(cpus)
    if len(numbers) == 1:
        numbers *= len(hosts)
    if len(numbers) != len(hosts) or not hosts:
        raise ValueError(f"it names {len(hosts)} nodes, but the CPUs of {len(numbers)}")
    return list(zip(hosts, numbers, strict=True))
