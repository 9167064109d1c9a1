"""Writing text: token after token, each drawn from what the model expects."""

from collections.abc import Iterator

import torch
from torch import Tensor

from trainer.model import GPT


class NotFiniteError(Exception):
    """The model's numbers are none."""


def sample(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator) -> int:
    """Draw a token from logits (vocab).

    Args:
        temperature: 0 takes the likeliest.
        top_k: only the so many likeliest.
        top_p: only the likeliest that together have this probability (Holtzman et al., 2020).
    """
    if temperature == 0:
        return int(logits.argmax())
    chances = ((logits.double() - logits.max()) / temperature).softmax(-1)
    ordered, tokens = chances.sort(descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        keep[top_k:] = False
    if top_p is not None:
        keep &= ordered.cumsum(-1) - ordered < top_p
        keep[0] = True
    return int(tokens[torch.multinomial(ordered * keep, 1, generator=generator)])


@torch.no_grad()
def generate(
    model: GPT,
    prompt: list[int],
    count: int,
    *,
    vocabulary: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens that follow a prompt, which must not be empty; the model sees the last `seq_len` of them.

    Args:
        vocabulary: tokens from here on are padding of the model's vocabulary, and are never drawn.
        stop: a token that ends the text.

    Raises:
        NotFiniteError: nothing can be drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens[-model.shape.seq_len :]]))[0, -1, :vocabulary]
        if logits.isnan().any():
            raise NotFiniteError("the model computes no numbers: the weights of this checkpoint are not finite")
        token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if token == stop:
            return
        tokens.append(token)
        yield token
