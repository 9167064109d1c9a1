"""Activation recomputation (Chen et al., 2016): what the backward pass computes again instead of keeping it.

`selective` keeps what is dear: products with weights, flash attention, what other ranks have sent. It computes again what is cheap,
as norms, rotations and activations, and attention by the explicit formula, whose scores are much to keep (Korthikanti et al.,
2022). `full` computes whole layers again.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.model import GPT, Block

_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default})
FROM_OTHERS = frozenset(
    {_collectives.all_gather_into_tensor.default, _collectives.reduce_scatter_tensor.default, _collectives.all_reduce.default}
)
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)

Keeps = Callable[[object], bool]
"""Whether an operation's result is kept."""


def apply(model: GPT, mode: Literal["none", "selective", "full"], every: int) -> None:
    """Have every `every`-th layer computed again, in place."""
    shape = model.shape
    for number in model.stage.layers:
        block = model.blocks[str(number)]
        assert isinstance(block, Block)
        if mode != "none" and number % every == 0:
            # Kernels that drop scores would leave random numbers undrawn where they are not computed again.
            keeps = partial(is_dear, attention=not shape.attention_dropout) if mode == "selective" else None
            _wrap(block, keeps, dropout=shape.dropout > 0, random=shape.dropout + shape.attention_dropout > 0)


def is_dear(operation: object, *, attention: bool) -> bool:
    """Whether `selective` keeps what an operation of a layer computes. Args: attention: whether its kernels count."""
    if operation in PRODUCTS or operation in FROM_OTHERS:
        return True
    package = isinstance(operation, torch._ops.OpOverload) and operation.namespace == "flash_attn"
    return attention and (package or operation in ATTENTION)


def _wrap(module: nn.Module, keeps: Keeps | None, *, dropout: bool, random: bool) -> None:
    # In place of `forward`, so that what others hook to the module stays outside: parameters are put together once.
    forward = module.forward

    # A function of its own: a layer whose `forward` is `checkpoint` itself, as by `partial`, is one that torch.compile skips.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
        if keeps is not None:
            options["context_fn"] = partial(_marked if torch.compiler.is_compiling() else _kept, keeps, dropout)
        return checkpoint(forward, *args, **options, **kwargs)

    module.forward = recomputed


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Those of the forward pass, and of computing again."""


def _marked(keeps: Keeps, _dropout: bool) -> Contexts:
    """For a layer that is being compiled: its operations are marked, and the compiler keeps of them what is needed."""

    def policy(_context: object, operation: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(operation) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def _kept(keeps: Keeps, dropout: bool) -> Contexts:
    """For a layer that runs operation by operation.

    PyTorch's own contexts let a layer be computed again once, and a backward pass that a schedule parts in two does it twice.
    """
    kept: list[Any] = []
    return _Keep(kept, keeps, last_too=dropout), _TakeKept(kept, keeps)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of operations, in their order.

    Args:
        last_too: the backward pass computes again what comes after the last product, as a dropout's mask; without it, nobody asks
            for that product.
    """

    def __init__(self, kept: list[Any], keeps: Keeps, *, last_too: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._keeps, self._last_too = kept, keeps, last_too
        self._products = 0  # kept when the last one came

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._keeps(func):
            if func in PRODUCTS:
                self._products = len(self._kept)
            self._kept.append(tree_map_only(Tensor, Tensor.detach, result))
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if not self._last_too:
            del self._kept[self._products :]


class _TakeKept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives, instead of computing again, what was kept."""

    def __init__(self, kept: list[Any], keeps: Keeps) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._keeps = kept, keeps
        self._taken = 0

    def __enter__(self) -> "_TakeKept":
        self._taken = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._keeps(func) and self._taken < len(self._kept):
            self._taken += 1
            return tree_map_only(Tensor, Tensor.detach, self._kept[self._taken - 1])
        return func(*args, **(kwargs or {}))
