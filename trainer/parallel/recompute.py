"""Activation recomputation (Chen et al., 2016): what the backward pass computes again instead of keeping it.

`selective` computes attention's core again, whose scores are much to keep and little to compute (Korthikanti et al., 2022); `full`
computes whole layers again.
"""

from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.model import GPT, Block


def apply(model: GPT, mode: Literal["none", "selective", "full"], every: int) -> None:
    """Have every `every`-th layer computed again, in place."""
    for number in model.stage.layers:
        block = model.blocks[str(number)]
        assert isinstance(block, Block)
        if mode != "none" and number % every == 0:
            _wrap(
                block.attention.core if mode == "selective" else block,
                random=model.shape.dropout + model.shape.attention_dropout > 0,
            )


def _wrap(module: nn.Module, *, random: bool) -> None:
    # In place of `forward`, so that what others hook to the module stays outside: parameters are put together once.
    forward = module.forward

    # A function of its own: a layer whose `forward` is `checkpoint` itself, as by `partial`, is one that torch.compile skips.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=random, **kwargs)

    module.forward = recomputed
