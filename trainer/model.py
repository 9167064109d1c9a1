"""A decoder-only transformer (GPT). A plain model: it knows nothing of ranks; `trainer.parallel` spreads it from outside.

RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), ALiBi (Press et al., 2022), SwiGLU (Shazeer, 2020), grouped
queries (Ainslie et al., 2023), μP (Yang et al., 2022).
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.attention import Apart, Core, Kernel
from trainer.data.bounds import Documents
from trainer.loss import CrossEntropy
from trainer.shape import GPTShape
from trainer.stages import Stage


class GPT(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab) or, with targets, to their summed loss.

    As a stage of a pipeline, hidden states (batch, seq, hidden) in or out.

    Args:
        stage: the part of the model to be; None: all of it.
    """

    def __init__(self, shape: GPTShape, kernel: Kernel = Kernel.MATH, stage: Stage | None = None) -> None:
        super().__init__()
        stage = stage or Stage(0, 1, range(shape.layers))
        self.shape, self.stage, self.kernel = shape, stage, kernel
        if stage.first:
            self.embedding = nn.Embedding(shape.vocab, shape.hidden)
            if shape.position == "learned":
                self.positions = nn.Embedding(shape.seq_len, shape.hidden)
            self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleDict({str(number): Block(shape, kernel) for number in stage.layers})
        if stage.last:
            self.norm = make_norm(shape)
            self.head = Head(shape)
        if shape.tied and stage.first and stage.last:
            self.head.weight = self.embedding.weight

    def forward(
        self, x: Tensor, positions: Tensor | None = None, documents: Documents | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """`positions` (batch, seq) are those of the tokens in their sample; `documents` are told apart; `targets` (batch, seq)."""
        if self.stage.first:
            x = self.embed(x, positions)
        apart = None if documents is None else Apart.of(documents, self.kernel, x.dtype)
        for block in self.blocks.values():
            x = block(x, positions=positions, apart=apart)
        if self.stage.last:
            x = self.norm(x)
            x = self.head(x if self.shape.width == 1 else x / self.shape.width, targets)
        return x

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        x = self.embedding(tokens)  # (batch, seq, hidden)
        if self.shape.position == "learned":
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
            x = x + self.positions(positions)
        result: Tensor = self.dropout(x)
        return result

    def global_name(self, name: str) -> str:
        """The name that a parameter of this part has in the whole model: a tied head is the embedding."""
        return "embedding.weight" if self.shape.tied and name == "head.weight" else name


class Head(nn.Linear):
    """Hidden states (batch, seq, hidden) to logits (batch, seq, vocab); with targets (batch, seq), to their summed loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__(shape.hidden, shape.vocab, bias=False)
        self.loss = CrossEntropy()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(x) if targets is None else self.loss(x, self.weight, targets)


class Block(nn.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self, shape: GPTShape, kernel: Kernel) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, kernel)
        self.mlp_norm = make_norm(shape)
        self.mlp: nn.Module = SwiGLU(shape) if shape.mlp == "swiglu" else GELU(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, positions: Tensor | None = None, apart: Apart | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions=positions, apart=apart))
        result: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return result


class Attention(nn.Module):
    """Causal self-attention; `kv_heads` groups of keys and values."""

    def __init__(self, shape: GPTShape, kernel: Kernel) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.seq_len = shape.seq_len
        self.theta = shape.rope_theta if shape.position == "rope" else None
        kv = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=shape.bias)
        self.key = nn.Linear(shape.hidden, kv, bias=shape.bias)
        self.value = nn.Linear(shape.hidden, kv, bias=shape.bias)
        # Cosines and sines of all positions, shared by the layers: what a compiled layer reads instead of computing it. No buffer,
        # which `to_empty` would leave unwritten and in a memory of its own for each layer.
        self.rotations: tuple[Tensor, Tensor] | None = None
        self.core = Core(shape, kernel)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=shape.bias)
        # Of the keys and values that are computed here, those that queries attend to, and how many heads of queries do; None: all.
        self.kv_shares: tuple[tuple[int, int], ...] | None = None

    def forward(self, x: Tensor, positions: Tensor | None = None, apart: Apart | None = None) -> Tensor:
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        if self.theta is not None:
            length = query.shape[2] if positions is None else self.seq_len
            cos, sin = self._rotations(length, query.device)
            if positions is not None:
                cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # (batch, 1, seq, head_dim / 2)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.kv_shares is not None:
            key, value = attended(key, self.kv_shares), attended(value, self.kv_shares)
        mixed = self.core(query, key, value, apart)
        result: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result

    def keep_rotations(self, device: torch.device) -> None:
        """Have the rotations of all positions on `device` before the first forward pass."""
        if self.theta is not None:
            self.rotations = _kept_rotary_table(self.seq_len, self.head_dim, self.theta, device)

    def _rotations(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.theta is not None
        if self.rotations is None or length > self.seq_len:
            return rotary_table(length, self.head_dim, self.theta, device)
        cos, sin = self.rotations
        return cos[:length], sin[:length]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)  # (batch, heads, seq, head_dim)


def attended(x: Tensor, shares: tuple[tuple[int, int], ...]) -> Tensor:
    """The heads of keys or values that queries attend to, of `x` (batch, kv_heads, seq, head_dim); one for each query where they
    share unevenly.

    By slices: an index would be copied to the GPU in every layer.
    """
    if len({queries for _, queries in shares}) == 1:
        return x.narrow(1, shares[0][0], len(shares))
    return torch.cat([x.narrow(1, head, 1).expand(-1, queries, -1, -1) for head, queries in shares], dim=1)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn_hidden, bias=shape.bias)
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=shape.bias)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class GELU(nn.Module):
    """down(gelu(up x))."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=shape.bias)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


def make_norm(shape: GPTShape) -> nn.Module:
    if shape.norm == "rmsnorm":
        return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
    return nn.LayerNorm(shape.hidden, eps=shape.norm_eps, bias=shape.bias)


def rotary_table(seq: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotations, each (seq, head_dim / 2), fp32."""
    if torch.compiler.is_compiling():  # which computes them as part of the graph
        return _rotary_table(seq, head_dim, theta, device)
    return _kept_rotary_table(seq, head_dim, theta, device)


def _rotary_table(seq: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        angle = torch.outer(torch.arange(seq, dtype=torch.float32, device=device), frequency)
        return angle.cos(), angle.sin()


_kept_rotary_table = lru_cache(maxsize=8)(_rotary_table)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (first half, second half) of the last dimension by their position's angles; computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
