"""Attention: softmax(query key^T × scale + bias) value, by the kernel that `trainer.kernels` chose. The model never knows which."""

from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.data.bounds import Documents
from trainer.shape import GPTShape


class Kernel(Enum):
    """What computes attention."""

    FLASH_ATTN = "flash_attn"  # the flash-attn package (Dao, 2023)
    FLASH_ATTN_3 = "flash_attn_3"  # FlashAttention-3 (Shah et al., 2024), in the place of PyTorch's own flash kernel
    SDPA_CUDNN = "sdpa_cudnn"  # cuDNN's
    SDPA_FLASH = "sdpa_flash"  # PyTorch's own flash kernel
    SDPA_EFFICIENT = "sdpa_efficient"  # CUDA's memory-efficient kernel: where flash takes no mask
    MATH = "math"


_BACKENDS = {
    Kernel.FLASH_ATTN_3: SDPBackend.FLASH_ATTENTION,
    Kernel.SDPA_CUDNN: SDPBackend.CUDNN_ATTENTION,
    Kernel.SDPA_FLASH: SDPBackend.FLASH_ATTENTION,
    Kernel.SDPA_EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Kernel.MATH: SDPBackend.MATH,
}


class Apart(NamedTuple):
    """What keeps the documents of a micro batch apart, as a kernel reads it; made once for all layers of a stage.

    Attributes:
        bounds: of the documents of all samples one after the other, (documents + 1), int32; None: the kernel takes `bias`.
        longest: no document has more tokens.
        bias: of scores, (batch, 1, seq, seq): -inf where a query may not see a key, for it comes later or is of another document,
            else 0; None: the kernel takes `bounds`.
    """

    bounds: Tensor | None
    longest: int
    bias: Tensor | None

    @classmethod
    def of(cls, documents: Documents, kernel: Kernel, dtype: torch.dtype) -> "Apart":
        """Args: dtype: of queries."""
        if kernel is Kernel.FLASH_ATTN:
            return cls(documents.bounds(), documents.longest, None)
        blocked = _blocked(documents.numbers)
        bias = torch.zeros(blocked.shape, dtype=dtype, device=blocked.device).masked_fill_(blocked, -torch.inf)
        return cls(None, documents.longest, bias)


class Core(nn.Module):
    """Causal attention of queries (batch, heads, seq, head_dim) to keys and values (batch, kv_heads, seq, head_dim).

    Attributes:
        head_offset: of the whole model's heads, the first one that is computed here.
        separate_random: a number that makes attention's dropout differ from this rank's other random numbers; None: it need not.
    """

    def __init__(self, shape: GPTShape, kernel: Kernel = Kernel.MATH) -> None:
        super().__init__()
        self.kernel = kernel
        self.scale = shape.attention_scale
        self.dropout = shape.attention_dropout
        # Plain numbers: a tensor's would have to be read within the layer, which ends a compiled graph.
        self.slopes: list[float] | None = alibi_slopes(shape.heads).tolist() if shape.position == "alibi" else None
        self.head_offset = 0
        self.separate_random: int | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, apart: Apart | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if not dropout or self.separate_random is None:
            return self._attend(query, key, value, apart, dropout)
        # Ranks that share their random numbers hold different heads here, and these must not drop the same scores.
        draw = int(torch.randint(2**62, ()))
        devices = [query.device] if query.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(draw ^ self.separate_random)
            return self._attend(query, key, value, apart, dropout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, apart: Apart | None, dropout: float) -> Tensor:
        slopes = self.slopes
        if slopes is not None:
            slopes = slopes[self.head_offset : self.head_offset + query.shape[1]]
        if self.kernel is Kernel.FLASH_ATTN:
            return _flash_attn(query, key, value, apart, slopes, self.scale, dropout)
        grouped = query.shape[1] != key.shape[1]
        seq, device = query.shape[2], query.device
        mask = None
        if slopes is not None:
            mask = alibi_bias(tuple(slopes), seq, query.dtype, device)  # (1, heads, seq, seq)
        if apart is not None:
            assert apart.bias is not None
            mask = apart.bias if mask is None else mask + apart.bias
        with sdpa_kernel(_BACKENDS[self.kernel]):
            return F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p=dropout, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )


def alibi_slopes(heads: int) -> Tensor:
    """Slopes of ALiBi (Press et al., 2022): geometric; a number of heads that is no power of two is filled from the next one."""

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (index + 1) / count) for index in range(count)]

    power = 1 << (heads.bit_length() - 1)
    return torch.tensor(geometric(power) + geometric(2 * power)[0::2][: heads - power], dtype=torch.float32, device="cpu")


@lru_cache(maxsize=4)
def alibi_bias(slopes: tuple[float, ...], seq: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-slope × distance, and -inf for what comes later; (1, heads, seq, seq)."""
    with torch.no_grad():
        place = torch.arange(seq, device=device)
        distance = (place[:, None] - place[None, :]).float()
        bias = -torch.tensor(slopes, device=device)[:, None, None] * distance
        return bias.masked_fill(distance < 0, -torch.inf).to(dtype).unsqueeze(0)


def _blocked(documents: Tensor) -> Tensor:
    """Where a query may not see a key: it comes later, or is of another document. (batch, 1, seq, seq), of numbers (batch, seq)."""
    seq = documents.shape[1]
    later = torch.ones(seq, seq, dtype=torch.bool, device=documents.device).triu(1)
    return (later | (documents[:, :, None] != documents[:, None, :])).unsqueeze(1)


def _flash_attn(
    query: Tensor, key: Tensor, value: Tensor, apart: Apart | None, slopes: list[float] | None, scale: float, dropout: float
) -> Tensor:
    """The flash-attn package, whose tensors are (batch, seq, heads, head_dim); documents become sequences of their own."""
    import flash_attn

    # Without it the backward pass adds up in whatever order its blocks come.
    options: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    options |= {"dropout_p": dropout, "softmax_scale": scale, "causal": True}
    if slopes is not None:
        options["alibi_slopes"] = torch.tensor(slopes, dtype=torch.float32).to(query.device)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if apart is None:
        return flash_attn.flash_attn_func(query, key, value, **options).transpose(1, 2)  # type: ignore[no-any-return]
    batch, seq = query.shape[:2]
    bounds, longest = apart.bounds, apart.longest
    packed = (x.reshape(batch * seq, *x.shape[2:]) for x in (query, key, value))
    mixed: Tensor = flash_attn.flash_attn_varlen_func(*packed, bounds, bounds, longest, longest, **options)
    return mixed.view(batch, seq, *mixed.shape[1:]).transpose(1, 2)
