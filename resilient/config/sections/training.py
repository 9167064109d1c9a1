"""What is trained, on which data, how it is spread over the ranks, and how it is optimized."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from resilient.config.batches import BatchSizes
from resilient.config.fields import Auto, Count, Flag, Fraction, Length, NonNegative, Positive, Rate, Section, no_bool


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
    virtual_stages: Count | Auto = Field("auto", description="stages per rank, 1 where pp is; auto: 2 for interleaved_1f1b, else 1")
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

    steps: Length = 300
    samples: Length | None = Field(None, description="in place of steps: samples to train on; steps follow from it")
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
