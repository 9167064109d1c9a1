"""From the config's model section to settled sizes, and their consequences in numbers. Pure, without torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.worker import Config


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
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"
    rope_theta: float = 10_000.0
    tied: bool = False
    init_std: float = 0.02

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its way up."""
        return self.mlp == "swiglu"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        kv = self.kv_heads * self.head_dim
        attention = ((self.hidden, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, self.hidden))
        wide = (self.ffn_hidden, self.hidden)
        return (*attention, *((wide, wide) if self.gated else (wide,)), (self.hidden, self.ffn_hidden))

    @property
    def layer_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.layer_matrices) + 2 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def arrays(self) -> int:
        """Arrays of a checkpoint that hold parameters: one per kind of layer matrix, however many layers."""
        return len(self.layer_matrices) + 2 + (1 if self.tied else 2) + 1


def shape_of(config: "Config", vocab: int) -> GPTShape:
    """The shape of the config's model.

    Args:
        vocab: tokens that the tokenizer knows; the model has room for the next multiple of 64.
    """
    model = config.model
    if model.ffn_hidden != "auto":
        ffn = model.ffn_hidden
    else:
        ffn = -(-(8 * model.hidden // 3 if model.mlp == "swiglu" else 4 * model.hidden) // 64) * 64
    return GPTShape(
        vocab=-(-vocab // 64) * 64,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.heads if model.kv_heads == "auto" else model.kv_heads,
        ffn_hidden=ffn,
        seq_len=model.seq_len,
        norm=model.norm,
        norm_eps=model.norm_eps,
        mlp=model.mlp,
        rope_theta=model.rope_theta,
        tied=model.tie_embeddings,
        init_std=model.init_std,
    )


def flops_per_token(shape: GPTShape) -> int:
    """Floating-point operations of forward and backward pass for one token.

    6 for each parameter that multiplies (all but norms and the embedding's look-up), and 12 × layers × hidden × seq_len for
    attention, as in appendix B of PaLM (Chowdhery et al., 2022), which counts the full square of scores.
    """
    multiplying = shape.layers * sum(rows * columns for rows, columns in shape.layer_matrices) + shape.vocab * shape.hidden
    return 6 * multiplying + 12 * shape.layers * shape.hidden * shape.seq_len


# Peak of dense bf16 matrix products, FLOP/s, from the makers' data sheets; a part of the device's name decides.
_PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12}


def peak_flops(device_name: str) -> float | None:
    """Peak rate of a device for MFU; None where it is not known, as for CPUs."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def activation_bytes(shape: GPTShape, micro_batch: int, *, bytes_per_number: int) -> int:
    """Activations that one micro batch keeps for the backward pass, with flash attention and no recomputation; an estimate.

    Per token and layer: inputs of both norms and of all matrices, queries, keys, values and the output of attention, and the
    MLP's inner values; and the logits with their fp32 copy and gradient.
    """
    kv = shape.kv_heads * shape.head_dim
    inner = (4 if shape.gated else 2) * shape.ffn_hidden
    per_layer = 6 * shape.hidden + 2 * (shape.hidden + kv) + 2 * kv + inner
    tokens = micro_batch * shape.seq_len
    return tokens * (shape.layers * per_layer * bytes_per_number + shape.vocab * (bytes_per_number + 8))
