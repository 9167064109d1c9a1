"""From the config's model section to settled sizes, and the table of parameters that follows. Pure, without torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from resilient.worker import Config

Kind = Literal["embedding", "matrix", "head", "norm", "bias"]


@dataclass(frozen=True)
class Weight:
    """A parameter: what it is, and how tensor parallelism cuts it.

    Attributes:
        kind: `matrix` for the inner ones, whose fan-in grows with the model; `norm` for gains.
        cut: the dimension that tensor-parallel ranks share, None if each holds the whole.
        residual: it writes into the residual stream.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    cut: int | None = None
    residual: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GPTShape:
    """Everything that makes a GPT what it is, settled; matrices are (rows, columns)."""

    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    seq_len: int
    position: str = "rope"
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"
    bias: bool = False
    rope_theta: float = 10_000.0
    tied: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    init_std: float = 0.02
    depth_scaled: bool = True
    mup_base: int | None = None

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its way up."""
        return self.mlp == "swiglu"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def width(self) -> float:
        """How many times wider than the model that was tuned (μP); 1 without."""
        return self.hidden / self.mup_base if self.mup_base else 1.0

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by: 1/sqrt(d), under μP 8/d (the same at d = 64)."""
        return 8 / self.head_dim if self.mup_base else self.head_dim**-0.5

    def layer(self, number: int | str) -> list[Weight]:
        """The parameters of one layer."""
        name, kv = f"blocks.{number}", self.kv_heads * self.head_dim
        wide = [("gate", self.ffn_hidden)] if self.gated else []
        return [
            *self._norm(f"{name}.attention_norm"),
            *self._linear(f"{name}.attention.query", (self.hidden, self.hidden), 0),
            *self._linear(f"{name}.attention.key", (kv, self.hidden), 0),
            *self._linear(f"{name}.attention.value", (kv, self.hidden), 0),
            *self._linear(f"{name}.attention.output", (self.hidden, self.hidden), 1),
            *self._norm(f"{name}.mlp_norm"),
            *(
                each
                for way, rows in (*wide, ("up", self.ffn_hidden))
                for each in self._linear(f"{name}.mlp.{way}", (rows, self.hidden), 0)
            ),
            *self._linear(f"{name}.mlp.down", (self.hidden, self.ffn_hidden), 1),
        ]

    def first(self) -> list[Weight]:
        """The parameters before the layers."""
        found = [Weight("embedding.weight", (self.vocab, self.hidden), "embedding", 0)]
        if self.position == "learned":
            found.append(Weight("positions.weight", (self.seq_len, self.hidden), "embedding", 0))
        return found

    def last(self) -> list[Weight]:
        """The parameters after the layers; with tied embeddings the head is the embedding."""
        head = [] if self.tied else [Weight("head.weight", (self.vocab, self.hidden), "head", 0)]
        return [*self._norm("norm"), *head]

    def weights(self) -> list[Weight]:
        """Every parameter, once."""
        return [*self.first(), *(each for number in range(self.layers) for each in self.layer(number)), *self.last()]

    @property
    def parameters(self) -> int:
        outside = sum(weight.size for weight in (*self.first(), *self.last()))
        return outside + self.layers * sum(weight.size for weight in self.layer(0))

    @property
    def arrays(self) -> int:
        """Arrays of a checkpoint that hold parameters: one per kind of parameter of a layer, however many layers."""
        return len(self.first()) + len(self.layer(0)) + len(self.last())

    def _norm(self, name: str) -> list[Weight]:
        found = [Weight(f"{name}.weight", (self.hidden,), "norm")]
        return [*found, Weight(f"{name}.bias", (self.hidden,), "bias")] if self.norm == "layernorm" and self.bias else found

    def _linear(self, name: str, shape: tuple[int, int], cut: int) -> list[Weight]:
        found = [Weight(f"{name}.weight", shape, "matrix", cut, residual=cut == 1)]
        return [*found, Weight(f"{name}.bias", shape[:1], "bias", 0 if cut == 0 else None)] if self.bias else found

    # -- what μP makes of a parameter ----------------------------------------------------------------------------------

    def std(self, weight: Weight) -> float:
        """Standard deviation at the start: init_std; by depth for the residual stream (Radford et al., 2019); by width under μP."""
        std = self.init_std
        if weight.residual and self.depth_scaled:
            std /= math.sqrt(2 * self.layers)
        return std / math.sqrt(self.width) if weight.kind == "matrix" else std

    def rate(self, weight: Weight) -> float:
        """What the learning rate is multiplied by; under μP matrices learn more slowly the wider they are."""
        return 1.0 / self.width if weight.kind == "matrix" else 1.0


def shape_of(config: "Config", vocab: int) -> GPTShape:
    """The shape of the config's model.

    Args:
        vocab: tokens that the data may hold; the model has room for the next multiple of `model.vocab_multiple`.
    """
    model = config.model
    return GPTShape(
        vocab=-(-vocab // model.vocab_multiple) * model.vocab_multiple,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.heads if model.kv_heads == "auto" else model.kv_heads,
        ffn_hidden=model.ffn,
        seq_len=model.seq_len,
        position=model.position,
        norm=model.norm,
        norm_eps=model.norm_eps,
        mlp=model.mlp,
        bias=model.bias,
        rope_theta=model.rope_theta,
        tied=model.tie_embeddings,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        init_std=model.init_std,
        depth_scaled=model.depth_scaled_init,
        mup_base=model.mup_base_hidden,
    )


def flops_per_token(shape: GPTShape) -> int:
    """Floating-point operations of forward and backward pass for one token.

    6 for each parameter that multiplies (all but norms, biases and the embeddings' look-ups), and 12 × layers × hidden × seq_len
    for attention, as in appendix B of PaLM (Chowdhery et al., 2022), which counts the full square of scores. What recomputation
    computes again is not counted.
    """
    multiplying = (
        shape.layers * sum(weight.size for weight in shape.layer(0) if weight.kind == "matrix") + shape.vocab * shape.hidden
    )
    return 6 * multiplying + 12 * shape.layers * shape.hidden * shape.seq_len


# Peaks of dense matrix products in bf16 and in fp32 (without TF32; None: not known), FLOP/s, from the makers' data sheets. All
# words must be in the device's name, and the first row decides. A device is what torch calls one: of an MI250X, one of two dies.
_PEAKS: tuple[tuple[tuple[str, ...], float, float | None], ...] = (
    (("A100",), 312e12, 19.5e12),
    (("H100", "PCIe"), 756e12, 51e12),
    (("H100", "NVL"), 835e12, 60e12),
    (("H100",), 989e12, 67e12),
    (("H200",), 989e12, 67e12),  # and GH200
    (("GB200",), 2500e12, None),
    (("B200",), 2250e12, None),
    (("MI250X",), 191.5e12, 47.9e12),
    (("MI250",), 181e12, 45.3e12),
    (("MI300A",), 980.6e12, 122.6e12),
    (("MI300",), 1307e12, 163.4e12),
)


def peak_flops(device_name: str, precision: str = "bf16") -> float | None:
    """Peak rate of a device for MFU, in `bf16` or `fp32`; None where it is not known, as for CPUs."""
    for words, bf16, fp32 in _PEAKS:
        if all(word in device_name for word in words):
            return bf16 if precision == "bf16" else fp32
    return None
