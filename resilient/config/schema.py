"""The config as typed models: every key, its type, its default and its range.

Owns the shape of a config and nothing else: reading files is `source`, checks across sections are `checks`.
Unknown keys are refused. All models are frozen: a running campaign cannot change under its own feet.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _no_bool(value: object) -> object:
    """YAML's `yes` is a boolean, and Python's True is a number; here it is not."""
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return value


Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
# Not strict: YAML reads 1e-3 as text.
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_bool)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(_no_bool)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_bool)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_no_bool)]


class Section(BaseModel):
    """Base of every section: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Cluster(Section):
    """Which processes there are, and where."""

    launcher: Literal["auto", "local", "slurm"] = "auto"
    nodes: Count = Field(1, description="agents to start; on one machine several agents stand for several nodes")
    procs_per_node: Count | Auto = Field("auto", description="ranks per node; auto: one per GPU, else 1")
    spares: NonNegative = 0
    min_nodes: Count = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_proc: Count | Auto = Field("auto", description="CPU threads of a rank; auto: cores / procs_per_node")


class Parallel(Section):
    """How the model is spread over the ranks: world size = tp × pp × dp."""

    tp: Count = 1
    pp: Count = 1
    dp: Count | Auto = "auto"
    sequence_parallel: Flag = True
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    zero_stage: Literal[1, 2, 3] = 1


class Model(Section):
    """A decoder-only transformer (GPT)."""

    layers: Count = 6
    hidden: Count = 256
    heads: Count = 8
    kv_heads: Count | Auto = Field("auto", description="groups of keys and values (GQA); auto: as many as heads")
    ffn_hidden: Count | Auto = Field("auto", description="auto: 4 × hidden, for swiglu 8/3 × hidden, to a multiple of 64")
    seq_len: Count = 256
    position: Literal["rope"] = "rope"
    rope_theta: Positive = 10_000.0
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Positive = 1e-5
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    attention: Literal["auto", "sdpa_flash", "math"] = "auto"
    tie_embeddings: Flag = False
    init_std: Positive = 0.02


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
    split: tuple[NonNegative, NonNegative, NonNegative] = (949, 50, 1)

    @model_validator(mode="before")
    @classmethod
    def _a_path_alone_means_no_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("path") is not None and "text" not in values:
            return {**values, "text": None}
        return values


class Train(Section):
    """How long, how much at once, how precise."""

    steps: Count = 300
    global_batch_size: Count = 16
    micro_batch_size: Count = 4
    precision: Literal["bf16", "fp32"] = "bf16"
    recompute: Literal["none"] = "none"
    eval_interval: NonNegative = Field(50, description="steps between validations; 0: only at the end")
    eval_iters: Count = 5


class Optimizer(Section):
    """AdamW and its learning-rate schedule, counted in samples."""

    name: Literal["adamw"] = "adamw"
    lr: Positive = 1e-3
    min_lr: Rate = 1e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_samples: NonNegative = 320
    decay_samples: Count | Auto = Field("auto", description="samples until min_lr; auto: the whole training")
    weight_decay: Rate = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Positive = 1e-8
    clip_grad: Rate = Field(1.0, description="global gradient norm; 0: no clipping")


class Tier(Section):
    """One place that holds checkpoints."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    path: Path
    keep_last: Count = 3
    every_steps: Count | None = None
    replicas: NonNegative = 0


class Checkpoint(Section):
    """When state is saved, and where; the last tier is the durable one."""

    every_steps: Count = 10
    tiers: Annotated[list[Tier], Field(min_length=1)] = [Tier(name="durable", path=Path("${run_dir}/checkpoints"), keep_last=3)]


class Resilience(Section):
    """How patient the supervisor is, and when it gives up."""

    link_grace_s: Seconds | Auto = "auto"
    fence_s: Seconds | Auto = Field("auto", description="an agent without its driver for so long kills its workers")
    drain_s: Seconds | Auto = Field("auto", description="time that a stop on request may take before workers are killed")
    max_restarts_per_hour: NonNegative = 30
    give_up_after_same_step: Count = 3


class Slurm(Section):
    """What a job of the chain asks Slurm for."""

    profile: str = "generic"
    signal_lead_s: Seconds | Auto = "auto"
    max_jobs: Count = 50


class Logging(Section):
    """What a person sees."""

    tensorboard: Flag = True
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(Section):
    """A whole campaign. `load` makes one from a file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    run_dir: Path = Path("runs/${name}")
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = 42
    entrypoint: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] = Field(
        "trainer.main:train", description="module:function that every rank calls"
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
    slurm: Slurm = Slurm()
    logging: Logging = Logging()
