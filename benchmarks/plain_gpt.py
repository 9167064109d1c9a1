"""What the trainer is compared with: a GPT script that a person writes in an hour: fp32 weights, autocast, SDPA, eager."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Of the model and of a step's batches. Attributes: accumulation: micro batches of a step."""

    layers: int
    hidden: int
    heads: int
    seq_len: int
    vocab_size: int
    micro_batch: int
    accumulation: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.micro_batch * self.accumulation * self.seq_len


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class PlainGPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width, heads, seq = size.hidden, size.heads, size.seq_len
        self.embed = nn.Embedding(size.vocab_size, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, size.vocab_size, bias=False)
        frequency = 10000.0 ** (-torch.arange(0, width // heads, 2).float() * heads / width)
        angle = torch.outer(torch.arange(seq).float(), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def plain_script(size: Size, device: torch.device, *, compiled: bool = False) -> Callable[[], None]:
    """A step of it, on random tokens. Args: compiled: each block is."""
    with device:
        model = PlainGPT(size)
    for block in model.blocks if compiled else ():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, size.vocab_size, (size.micro_batch * size.accumulation, size.seq_len + 1), device=device)

    def step() -> None:
        for part in tokens.split(size.micro_batch):
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten()) / size.accumulation
            loss.backward()
        float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()

    return step
