"""State dicts of all kinds, and what torch.distributed.checkpoint says of one that fails."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException


def awkward(empty: bool = False) -> dict[str, Any]:
    """Whatever a state dict may hold."""
    values: dict[str, Any] = {
        "matrix": torch.arange(12.0).reshape(3, 4),
        "transposed": torch.arange(12).reshape(3, 4).t(),
        "number": torch.tensor(3.5),
        "nothing": torch.ones(0, 4),
        "bf16": torch.linspace(0, 1, 5).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "a/b": torch.ones(2),
        ".hidden": torch.ones(3),
        "zarr.json": torch.ones(4),
        "__nested__": {"100%": torch.ones(5), "": {"deep": torch.ones(6)}},
        "list": [torch.ones(7), "text", {"inner": torch.ones(8)}],
        "step": 40,
        "group": {"lr": 1e-3, "betas": (0.9, 0.95), "name": None},
    }
    return blank(values) if empty else values


def blank(value: Any) -> Any:
    """The same with zeros, and other objects."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return [blank(each) for each in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "not loaded"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(each, other[key]) for key, each in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def failure(work: Callable[[], Any]) -> list[BaseException]:
    """What DCP says went wrong, by rank; it raises what `except Exception` does not catch."""
    try:
        work()
    except CheckpointException as error:
        return [error.failures[rank][0] for rank in sorted(error.failures)]
    return []
