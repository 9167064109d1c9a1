"""A decoder-only transformer (GPT). A plain model: it knows nothing of ranks; `trainer.parallel` spreads it from outside.

RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU (Shazeer, 2020), grouped queries (Ainslie et al.,
2023). No biases.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.shape import GPTShape


class GPT(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = make_norm(shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (batch, seq, hidden)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = make_norm(shape)
        self.mlp: nn.Module = SwiGLU(shape) if shape.mlp == "swiglu" else GELU(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Attention(nn.Module):
    """Causal self-attention with rotary positions; `kv_heads` groups of keys and values."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.head_dim = shape.hidden // shape.heads
        self.theta = shape.rope_theta
        self.grouped = shape.kv_heads != shape.heads
        self.query = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=False)
        self.key = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, seq, -1, self.head_dim).transpose(1, 2)  # (batch, heads, seq, head_dim)

        cos, sin = rotary_table(seq, self.head_dim, self.theta, x.device)
        query, key = rotate(heads(self.query(x)), cos, sin), rotate(heads(self.key(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, heads(self.value(x)), is_causal=True, enable_gqa=self.grouped)
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return result


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class GELU(nn.Module):
    """down(gelu(up x))."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn_hidden, bias=False)
        self.down = nn.Linear(shape.ffn_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return result


def make_norm(shape: GPTShape) -> nn.Module:
    if shape.norm == "rmsnorm":
        return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
    return nn.LayerNorm(shape.hidden, eps=shape.norm_eps, bias=False)


@lru_cache(maxsize=8)
def rotary_table(seq: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotations, each (seq, head_dim / 2), fp32."""
    with torch.no_grad():
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        angle = torch.outer(torch.arange(seq, dtype=torch.float32, device=device), frequency)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (first half, second half) of the last dimension by their position's angles; computed in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
