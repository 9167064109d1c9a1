"""Where a campaign runs: nodes and ranks, their network, and jobs of Slurm."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from resilient.config.fields import Auto, Count, Flag, NonNegative, Positive, Rate, Seconds, Section, off


def _number_as_text(value: object) -> object:
    """Variables are text, and YAML reads 1 as a number."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


# Of InfiniBand: the unit of a timeout, its exponents that NCCL documents, and the retries that three bits hold.
IB_TICK_S = 4.096e-6
IB_TIMEOUTS = (1, 22)
IB_RETRIES = (0, 7)


class Cluster(Section):
    """Which processes there are, and where."""

    launcher: Literal["auto", "local", "slurm"] = Field(
        "auto",
        description="where agents run; local: on this machine; slurm: on the nodes of the job; auto: slurm in a job, else local",
    )
    nodes: Count | Auto = Field(
        1,
        description="agents to start; on one machine several agents stand for several nodes; auto: all nodes of the job less the "
        "spares, and one where there is no job",
    )
    procs_per_node: Count | Auto = Field(
        "auto", description="ranks per node; auto: one per GPU, else 1; agents on one machine, spares too, share its GPUs"
    )
    min_procs_per_node: Count | None = Field(
        None,
        description="fewest working devices with which a node takes part, without those that have failed; null: a node with a "
        "failed device takes no part",
    )
    domains: list[str] | None = Field(
        None, description="failure domain of each node, then of each spare; replicas are kept in another one"
    )
    spares: NonNegative = Field(0, description="nodes beside these that stand by, warm, to take over from one that is lost")
    min_nodes: Count = Field(
        1,
        description="fewest nodes with which training goes on when nodes are lost and no spare is left; data parallelism shrinks",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="what ranks compute on; auto: cuda where there is a GPU, else cpu"
    )
    binding: Literal["auto", "none", "numa"] = Field(
        "auto",
        description="numa: ranks run at the cores and memory of their GPU's NUMA domain, without GPUs they divide the domains; "
        "auto: so on GPUs, where there are several domains",
    )
    gpu_memory_gib: Positive | Literal["auto", "none"] = Field(
        "auto",
        description="memory of each GPU in GiB, with which the need of a rank is compared; auto: what ranks find there; none: "
        "nothing is compared",
    )
    fabric: Path | None = Field(
        None,
        description="a file of switches as Slurm's topology.conf, by which nodes are ordered and replicas kept apart; null: "
        "SLURM_TOPOLOGY_ADDR of each node tells",
    )
    threads_per_proc: Count | Auto = Field(
        "auto", description="CPU threads of a rank; auto: cores / procs_per_node, of a script one, as torchrun has it"
    )
    tls: Annotated[Literal["off", "psk"], BeforeValidator(off)] = Field(
        "off", description="psk: agents, driver and snapshot daemons talk over TLS with a pre-shared key; needs Python 3.13"
    )

    @property
    def computing(self) -> int:
        """Nodes that compute; one as long as that is left to a job which nobody knows yet."""
        return 1 if self.nodes == "auto" else self.nodes

    @property
    def slots(self) -> int:
        """Nodes of the allocation: those that compute, and spares."""
        return self.computing + self.spares


class Network(Section):
    """How communication bears links that fail. What is null is left to the environment, which is held to the same ranges."""

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@,-]*$")] | None = Field(
        None, description="name of the interface for NCCL's and gloo's sockets; null: loopback while all agents are on one machine"
    )
    link_down_s: Annotated[Seconds, Field(le=120)] | None = Field(
        None, description="so long an InfiniBand port may be down without an error of NCCL: chooses ib_timeout, with 7 retries"
    )
    ib_timeout: Annotated[int, Field(ge=IB_TIMEOUTS[0], le=IB_TIMEOUTS[1], strict=True)] | None = Field(
        None, description="NCCL_IB_TIMEOUT t: a try takes 4.096 µs × 2^t"
    )
    ib_retries: Annotated[int, Field(ge=IB_RETRIES[0], le=IB_RETRIES[1], strict=True)] | None = Field(
        None, description="NCCL_IB_RETRY_CNT"
    )
    collective_timeout_s: Seconds | Auto = Field(
        "auto",
        description="of process groups that are made without one; auto: 20 s more than the longest silence that the watchdog bears",
    )
    ucx_rc_timeout_s: Seconds | None = Field(None, description="UCX_RC_TIMEOUT, of one try; for programs that use UCX beside NCCL")
    async_error_handling: Annotated[int, Field(ge=0, le=3, strict=True)] | None = Field(
        None, description="TORCH_NCCL_ASYNC_ERROR_HANDLING: 0 none, 1 abort and exit, 2 abort, 3 exit, which is torch's own choice"
    )
    heartbeat_s: Count | None = Field(
        None,
        description="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: torch ends a process whose NCCL watchdog is stuck for so long; null: "
        "a while after a collective has timed out",
    )
    flight_recorder: NonNegative | None = Field(
        None, description="TORCH_FR_BUFFER_SIZE: collectives remembered for a dump; torch keeps 2000 by itself"
    )
    dump_on_timeout: Flag | None = Field(
        None, description="TORCH_NCCL_DUMP_ON_TIMEOUT: the flight recorder is written beside the ranks' logs"
    )
    nccl_debug: Literal["version", "warn", "info", "trace"] | None = Field(
        None, description="NCCL_DEBUG; warn says in the log which link failed, and costs nothing"
    )
    torch_debug: Literal["info", "detail"] | None = Field(
        None, description="TORCH_DISTRIBUTED_DEBUG; detail checks every collective on all ranks, and is slow"
    )


class Container(Section):
    """Apptainer or Singularity around agents and ranks."""

    image: Path = Field(description="a .sif file, or a directory")
    binds: list[str] = Field(
        [],
        description="as in /data or /host:/inside:ro; the run directory, the tiers and where the command is run are bound anyway",
    )
    nv: Flag | Auto = Field("auto", description="NVIDIA GPUs inside; auto: where there are any")
    runtime: Literal["auto", "apptainer", "singularity"] = Field("auto", description="auto: the first of them on the PATH")
    python: str = Field("python3", description="the interpreter in the image")
    driver: Flag = Field(
        False,
        description="the driver of a chain's jobs runs inside, too, where srun, squeue, sbatch, scancel and scontrol must work",
    )


class Slurm(Section):
    """What a job of the chain asks Slurm for."""

    profile: str = Field(
        "generic", description="what is usual at the site, for keys that stand nowhere else: a name, as in docs/slurm.md, or a file"
    )
    hostname_suffix: str = Field("", description="of a host's name on the fast network, as in jwb0001i")
    interface: str | None = Field(
        None,
        description="on which the driver is reached in a job, and on which NCCL and gloo talk unless network.interface or the "
        "environment says otherwise; null: whatever names lead to",
    )
    cpu_bind: str = Field("auto", description="of the steps that run agents, as srun takes it; auto: none")
    gpus_per_task: Count | None = Field(
        None, description="of the steps that run agents, for all ranks of a node; null: all that the job has there"
    )
    srun_args: list[str] = Field([], description="more options for these steps, which win over those above")
    signal_lead_s: Seconds | Auto = Field(
        "auto", description="before the limit of a job, to make its state durable; auto: as long as that was measured to take"
    )
    max_jobs: Count = Field(50, description="of the chain; none is submitted beyond")
    time_min: Count | None = Field(
        None,
        description="minutes that each job may take; null: the partition's limit, if limits_min has it, else its default",
    )
    limits_min: dict[str, Count] = Field({}, description="minutes that the site's partitions allow, by name")
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = Field(None, description="of each node, as in gpu:4")
    gpus_per_node: Count | None = None
    cpus_per_node: Count | None = Field(None, description="needed where a job is not given whole nodes")
    requeue: Flag = Field(False, description="Slurm may put a job back in the queue when a node fails or is wanted back")
    bad_node_hours: Rate = Field(
        24.0, description="for which the campaign's jobs do without a node that caused a fault; 0: none is left out"
    )
    extra: list[str] = Field([], description="more lines of #SBATCH, as in --mail-type=FAIL")
    modules: list[str] = Field([], description="loaded first in the job, by `module load`")
    setup: list[str] = Field([], description="lines of shell that come next: environments, as in source venv/bin/activate")
    environment: dict[str, Annotated[str, BeforeValidator(_number_as_text)]] = Field(
        {}, description="variables for agents and ranks in a job"
    )
    python: str | None = Field(None, description="the interpreter in the job; null: the one that submits")
    container: Container | None = Field(None, description="in which agents and ranks run; null: in none")

    @property
    def other_packages(self) -> bool:
        """Whether the driver of a job may find other packages than who submits it."""
        inside = self.container is not None and self.container.driver
        return inside or self.python is not None or bool(self.modules or self.setup)

    @property
    def minutes(self) -> int | None:
        """What a job may take, settled; None: the partition's default."""
        return self.limits_min.get(self.partition or "") if self.time_min is None else self.time_min
