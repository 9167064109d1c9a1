"""The config as typed models: every key, its type, its default and its range.

Owns the shape of a config and nothing else: reading files is `source`, checks across sections are `checks`.
Unknown keys are refused. All models are frozen: a running campaign cannot change under its own feet.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from resilient.config.batches import BatchSizes
from resilient.config.fields import Auto, Count, Flag, Fraction, NonNegative, Positive, Rate, Seconds, Section, no_bool, not_empty
from resilient.config.sinks import Sinks


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
    tls: Literal["off", "psk"] = Field(
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


class Parallel(Section):
    """How the model is spread over the ranks: world size = tp × cp × pp × dp."""

    tp: Count = Field(1, description="tensor parallelism: ranks that share every matrix; inside a node")
    cp: Count = Field(1, description="context parallelism: ranks that share every sequence; on GPUs")
    pp: Count = Field(1, description="pipeline parallelism: ranks that share the layers")
    dp: Count | Auto = Field(
        "auto", description="data parallelism; auto: what the other ranks leave; while nodes are lost it is what is left"
    )
    dp_shard: Count | Auto = Field(
        "auto", description="of dp, ranks that shard the state among them; auto: dp / dp_replicate; stays while nodes are lost"
    )
    dp_replicate: Count | Auto = Field(
        1,
        description="hybrid sharding: groups of dp_shard ranks that hold the same shards, best on different nodes; dp is dp_shard "
        "× dp_replicate; auto: as many as dp makes, and one that shares everything where dp_shard does not divide it",
    )
    sequence_parallel: Flag = Field(True, description="with tp: norms and residuals are spread along the sequence")
    async_tp: Flag = Field(
        False, description="with tp: ranks exchange parts of the sequence in a ring while layers multiply the parts that are there"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field("1f1b", description="of the pipeline")
    virtual_stages: Count | Auto = Field("auto", description="stages per rank; auto: 2 for interleaved_1f1b, else 1")
    pp_layers: list[Count] | Auto = Field("auto", description="layers of each stage; auto: as even as can be, the first ones more")
    zero_stage: Literal[1, 2, 3] = Field(
        1, description="1: shard optimizer state; 2: gradients too, between micro batches; 3: parameters too"
    )
    reduce_gradients: Literal["auto", "last", "every"] = Field(
        "auto",
        description="gradients are reduced over the replicas in the last backward pass of a step, until when they add up whole on "
        "each rank, or in every one, into fp32 shards; auto: every at ZeRO 2 and 3 without a pipeline, and where memory needs it",
    )


class Model(Section):
    """A decoder-only transformer (GPT)."""

    layers: Count = 6
    hidden: Count = 256
    heads: Count = 8
    kv_heads: Count | Auto = Field("auto", description="groups of keys and values (GQA); auto: as many as heads")
    ffn_hidden: Count | Auto = Field("auto", description="auto: 4 × hidden, for swiglu 8/3 × hidden, to a multiple of 64")
    seq_len: Count = 256
    vocab_size: Count | Auto = Field("auto", description="tokens that the data may hold; auto: as many as the tokenizer has")
    vocab_multiple: Count = Field(64, description="the model has room for the next multiple of so many tokens")
    position: Literal["rope", "alibi", "learned", "none"] = "rope"
    rope_theta: Positive = 10_000.0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Positive = 1e-5
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    bias: Flag = Field(False, description="biases in linear layers and in layernorm")
    attention: Literal["auto", "flash_attn", "flash_attn_3", "sdpa_cudnn", "sdpa_flash", "math"] = Field(
        "auto",
        description="auto: on GPUs the fastest of those that run, timed once in a campaign at its own shapes (attention.json in "
        "the run directory); on CPUs sdpa_flash where it runs, else math",
    )
    dropout: Fraction = Field(0.0, description="after the embedding and before each residual addition")
    attention_dropout: Fraction = 0.0
    tie_embeddings: Flag = False
    init_std: Positive = 0.02
    depth_scaled_init: Flag = Field(True, description="what writes into the residual stream starts smaller by sqrt(2 × layers)")
    mup_base_hidden: Count | None = Field(
        None, description="μP: the hidden size at which lr and init_std were tuned; widths scale them from there"
    )

    @property
    def ffn(self) -> int:
        """Width of the MLP, settled."""
        if self.ffn_hidden != "auto":
            return self.ffn_hidden
        return -(-(8 * self.hidden // 3 if self.mlp == "swiglu" else 4 * self.hidden) // 64) * 64


class Tokenizer(Section):
    """Byte-level BPE: trained on the data, or a given GPT-2 vocabulary."""

    vocab_size: Annotated[int, Field(ge=257, strict=True)] = Field(4096, description="of the tokenizer that is trained")
    vocab_file: Path | None = Field(None, description="GPT-2 vocab.json; together with merges_file")
    merges_file: Path | None = Field(None, description="GPT-2 merges.txt; together with vocab_file")


class WeightedPath(Section):
    """One indexed dataset of a blend."""

    path: Path
    weight: Positive = 1.0


class Data(Section):
    """What the model reads."""

    text: Auto | list[Path] | None = Field(
        "auto", description="what to prepare: auto (English prose that comes with Python), or text/JSONL files"
    )
    path: Path | list[WeightedPath] | None = Field(
        None, description="prepared: prefix of an indexed dataset (.bin/.idx), or a weighted list"
    )
    tokenizer: Tokenizer = Tokenizer()
    mask_documents: Flag = Field(False, description="documents in one sample do not see each other; positions begin anew")
    mask_end_of_text: Flag = Field(False, description="predicting what follows the end of a text costs nothing")
    end_of_text: NonNegative | Auto = Field("auto", description="the token that ends a document; auto: ask the tokenizer")
    split: tuple[NonNegative, NonNegative, NonNegative] = (949, 50, 1)

    @model_validator(mode="before")
    @classmethod
    def _a_path_alone_means_no_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("path") is not None and "text" not in values:
            return {**values, "text": None}
        return values


class Rampup(Section):
    """The global batch grows from `start` to `global_batch_size` by `increment`, evenly over `samples`."""

    start: Count = Field(description="global batch of the first step")
    increment: Count = Field(description="by which it grows each time")
    samples: Count = Field(description="consumed by when it has its full size")


class Guard(Section):
    """Checks that keep a bad batch out of the weights. A bad batch is computed again; if it is bad again, it is skipped."""

    not_finite: Flag = Field(True, description="a loss or gradient norm that is NaN or infinite is bad")
    spike: Positive | None = Field(
        None, description="a loss so many standard deviations above the mean of the window is bad; null: no loss is"
    )
    window: Annotated[int, Field(ge=2, strict=True)] = Field(64, description="losses that a spike is compared with")
    max_skips: NonNegative = Field(3, description="batches skipped one after the other; one more ends the attempt")


class Train(Section):
    """How long, how much at once, how precise."""

    steps: Count = 300
    samples: Count | None = Field(None, description="in place of steps: samples to train on; steps follow from it")
    global_batch_size: Count = Field(
        16, description="samples of a step, a multiple of micro_batch_size; at least one for each replica, which need not divide it"
    )
    micro_batch_size: Count = Field(4, description="samples of a pass; replicas have one pass more than others at the most")
    batch_rampup: Rampup | None = Field(
        None, description="a global batch that grows at the start of training; null: it has its full size from the first step on"
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto",
        description="auto: bf16 on GPUs of compute capability 8.0 or later and on CPUs with AMX or of AMD's Zen 5, else fp32; a "
        "run keeps what it began with",
    )
    grad_dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="of whole gradients that add up over micro batches (reduce_gradients: last); ranks reduce in fp32 either way; "
        "auto: fp32, and bf16 where nothing else fits the GPU's memory",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="what the backward pass computes again: nothing; norms, rotations and activations, with what is dear kept; or "
        "whole layers",
    )
    recompute_every: Count = Field(1, description="with recompute: only every so many layers")
    compile: Flag | Auto = Field(
        "auto",
        description="torch.compile, layer by layer, and of the loss; auto: on GPUs, where a C compiler is; a run keeps what it "
        "began with",
    )
    deterministic: Flag = Field(False, description="only kernels that give the same bits every time; CPU kernels do anyway")
    exit_duration_min: Positive | None = Field(None, description="stop with state saved (exit 75) after so many minutes")
    eval_interval: NonNegative = Field(50, description="steps between validations; 0: only at the end")
    eval_iters: Count = 5
    guard: Guard = Guard()

    @model_validator(mode="before")
    @classmethod
    def _steps_follow_from_samples(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("samples") is None:
            return values
        try:
            batches = BatchSizes.of(values)
            if batches.full < 1 or (batches.samples and min(batches.start, batches.increment) < 1):
                return values
            steps = batches.steps(int(values["samples"]))
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError):
            return values  # what is wrong with them is said elsewhere
        return {"steps": steps, **values}

    @property
    def batches(self) -> BatchSizes:
        """The global batch size over the course of training."""
        return BatchSizes.of(self.model_dump())


class Optimizer(Section):
    """The optimizer and its learning-rate schedule, counted in samples or in tokens."""

    name: Literal["adamw", "adan", "muon"] = Field("adamw", description="muon: of the inner matrices; adamw beside it")
    lr: Positive = 1e-3
    min_lr: Rate = 1e-4
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_samples: NonNegative | Auto = Field(
        "auto", description="auto: warmup_tokens, else 320 or a tenth of the decay if that is less"
    )
    warmup_tokens: NonNegative | None = Field(None, description="in place of warmup_samples")
    decay_samples: Count | Auto = Field("auto", description="samples until min_lr; auto: the whole training, or decay_tokens")
    decay_tokens: Count | None = Field(None, description="in place of decay_samples")
    wsd_fraction: Annotated[float, Field(gt=0, le=1), BeforeValidator(no_bool)] = Field(
        0.1, description="wsd (warm-up, stable, decay): the share of decay_samples in which the rate falls"
    )
    weight_decay: Rate = Field(0.1, description="of matrices; norms and biases have none")
    beta1: Fraction | Auto = Field("auto", description="auto: 0.9, for adan 0.98")
    beta2: Fraction | Auto = Field("auto", description="auto: 0.95, for adan 0.92")
    beta3: Fraction = Field(0.99, description="of adan")
    momentum: Fraction = Field(0.95, description="of muon")
    eps: Positive = 1e-8
    clip_grad: Rate = Field(1.0, description="global gradient norm; 0: no clipping")

    @property
    def betas(self) -> tuple[float, float, float]:
        """The decay rates, settled."""
        first, second = (0.98, 0.92) if self.name == "adan" else (0.9, 0.95)
        return (first if self.beta1 == "auto" else self.beta1, second if self.beta2 == "auto" else self.beta2, self.beta3)


class Tier(Section):
    """One place that holds checkpoints."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    path: Path
    keep_last: Count | Auto = Field("auto", description="newest ones that are kept; auto: 3 on the durable tier, 1 in RAM, else 2")
    keep_every: Count | None = Field(None, description="on the durable tier, multiples of so many steps are kept for good")
    every_steps: Count | Auto | None = Field(
        None, description="auto: the interval of Young and Daly; unset: checkpoint.every_steps, and for a tier in RAM every step"
    )
    every_s: Seconds | None = Field(None, description="in place of every_steps: at the first step after so many seconds")
    replicas: NonNegative | Auto = Field(
        0,
        description="1: another node keeps a copy of each node's part; with hybrid sharding none is made in RAM where another node "
        "holds the same anyway; auto: 1 in RAM, else 0",
    )
    max_mib_s: Positive | None = Field(None, description="write no faster than this")


class Checkpoint(Section):
    """When state is saved, and where; tiers are listed fastest first, and the last one is the durable one."""

    every_steps: Count | Auto = Field(10, description="of the durable tier; auto: the interval of Young and Daly")
    tiers: Annotated[list[Tier], Field(min_length=1)] = Field([Tier(name="durable", path=Path("${run_dir}/checkpoints"))])
    memory_cost: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(no_bool)] = Field(
        0.005,
        description="where no tier but the durable one is named: snapshots in RAM as often as they take at most this share of the "
        "time, which is measured, every step where that is so; 0: none but those on their way to the durable tier",
    )


class Resilience(Section):
    """How patient the supervisor is, and when it gives up."""

    link_grace_s: Seconds | Auto = Field(
        "auto", description="ranks may wait for each other so long while a link is down or has just come back; auto: 60"
    )
    fence_s: Seconds | Auto = Field("auto", description="an agent without its driver for so long kills its workers; auto: 180")
    lost_s: Seconds | Auto = Field(
        "auto", description="a node whose agent sends nothing for so long is lost; auto: 8 while a spare stands by, else 35"
    )
    rejoin_s: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_bool)] | Auto = Field(
        "auto", description="a lost node is waited for so long, where no spare is there, before fewer nodes go on; auto: 30"
    )
    without_spare: Literal["auto", "shrink", "wait", "next_job"] = Field(
        "auto",
        description="where a node is gone and no spare is there: fewer go on, it is waited for, or the job ends for the next one; "
        "auto: what costs least, by what nodes have taken to come back, jobs to start, and the time left",
    )
    drain_s: Seconds | Auto = Field(
        "auto",
        description="time that a stop on request may take before workers are killed; auto: 25, and in a job of Slurm twice what a "
        "stop was measured to take if that is longer",
    )
    run_dir_patience_s: Seconds | Auto = Field(
        "auto", description="training goes on for so long while the run directory cannot be written, then the job drains; auto: 900"
    )
    hang_floor_s: Seconds = Field(
        10.0,
        description="shortest silence after which a rank is suspected of a hang; the limit itself is learned: five times "
        "the silence that is usual in a step",
    )
    hang_ceiling_s: Seconds = Field(
        600.0,
        description="longest silence after which a rank is suspected of a hang, whatever was learned; it is the limit as long as "
        "nothing was learned of a phase",
    )
    health_check: Flag | Seconds = Field(
        True,
        description="nodes are checked before they take part: right results, a tier to write to, limits; a number: seconds that it "
        "may take, true: 30, and 120 on GPUs, which may be cold",
    )
    gpu_standby: Literal["auto"] | Flag = Field(
        "auto",
        description="processes that stand by to be ranks have a context, cuBLAS, attention kernels and compiled layers ready "
        "on their GPUs; auto: where the memory of a GPU has room for that beside its rank",
    )
    straggler: Literal["off", "report", "replace"] = Field(
        "report", description="a rank that is persistently slower than others with the same work; replace: its node, once"
    )
    straggler_factor: Annotated[float, Field(gt=1), BeforeValidator(no_bool)] = Field(
        1.5, description="so many times the median of the others, in what it spends without waiting for them"
    )
    straggler_steps: Count = Field(50, description="over which that is measured; it is reported after two such windows in a row")
    on_stop: Literal["raise", "signal", "callback"] = Field(
        "raise",
        description="how a script that does not ask (worker.should_stop) is stopped, after the same optimizer step on all ranks: "
        "SystemExit before its next step, SIGTERM for a script that handles it, or not at all, as an adapter asks",
    )
    on_hangup: Literal["go_on", "drain"] = Field(
        "go_on",
        description="what SIGHUP does, which comes when a terminal is closed: nothing but a line in driver.log, or a stop as by "
        "Ctrl-C; under `nohup` it never does anything",
    )
    max_restarts_per_hour: NonNegative = Field(
        30, description="after so many restarts within an hour, the next fault ends the run with exit 70"
    )
    give_up_after_same_step: Count = Field(
        3, description="failures of the same kind at the same step, without progress; twice as many if they differ"
    )
    max_roll_backs: NonNegative = Field(
        3, description="to ever older checkpoints because the numbers are bad, without progress; then it gives up"
    )
    backoff_s: Seconds = Field(
        30.0, description="longest pause before a restart: 0.5 s, then twice as long with each restart that brought no progress"
    )


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
    def minutes(self) -> int | None:
        """What a job may take, settled; None: the partition's default."""
        return self.limits_min.get(self.partition or "") if self.time_min is None else self.time_min


class Logging(Section):
    """What a person sees."""

    tensorboard: Flag = True
    tensorboard_queue_size: Count = Field(10, description="scalars kept before they are written")
    log_interval: Count = Field(1, description="steps between lines of the log, and between points in TensorBoard")
    timers: Flag = Field(True, description="seconds of each phase of a step, in the metrics")
    memory: Flag = Field(True, description="peak memory of rank 0, in the metrics")
    batch_size: Flag = Field(True, description="the global batch size, in the metrics")
    world_size: Flag = Field(False, description="ranks, in the metrics")
    validation_ppl: Flag = Field(True, description="perplexity beside the validation loss")
    profile_steps: tuple[Count, Count] | None = Field(
        None,
        description="first and last step recorded by torch.profiler; traces go to profile/ in the run directory, one for each "
        "restart that computes any of these steps",
    )
    profile_ranks: list[NonNegative] = Field([0], description="ranks that record a trace")
    inspect_step: Count | None = Field(
        None,
        description="a step of which rank 0 measures, by torch.profiler, the tensors that it holds and how long it communicates; "
        "`resilient bench` takes the last one of the warm-up",
    )
    nvtx: Flag = Field(False, description="NVTX ranges of the phases, for Nsight Systems; on GPUs")
    progress: Literal["auto", "live", "plain", "none"] = Field(
        "auto",
        description="display on the terminal; live: events and a status line; plain: events, and the step now and then; none: no "
        "events; auto: live on a terminal, else plain",
    )
    level: Literal["debug", "info", "warning", "error"] = "info"
    sinks: Sinks = Sinks()


class Chaos(Section):
    """Whether this campaign may be broken on purpose."""

    allow: Flag = Field(False, description="`resilient chaos` may inject faults; ranks look out for those that they are to make")


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
    entrypoint: Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|-m [A-Za-z_][\w.]*( .*)?|.+\.py\b.*)$")] = Field(
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
