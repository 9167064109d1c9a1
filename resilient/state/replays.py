"""CUDA graphs that are replayed: before each of them whoever copies tensors is told that they change.

Owns what stands in the place of `torch.cuda.CUDAGraph.replay`, once in a process. What was recorded in a graph it does not say, and
what it changes shows on no tensor: each counts as an optimizer's step.
"""

import functools
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from checkpoint import Snapshots

_told: WeakSet[Snapshots] = WeakSet()  # before each replay
os.register_at_fork(after_in_child=_told.clear)  # what copies is the parent's


def tell(snapshots: Snapshots) -> None:
    """Have these told `before_change` by whoever replays a graph from now on."""
    _told.add(snapshots)
    replay = torch.cuda.CUDAGraph.replay
    if not hasattr(replay, "_tells"):
        torch.cuda.CUDAGraph.replay = _telling(replay)  # type: ignore[method-assign]


def _telling(replay: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replay)
    def told(*arguments: Any, **more: Any) -> Any:
        for each in tuple(_told):
            each.before_change()
        return replay(*arguments, **more)

    told._tells = True  # type: ignore[attr-defined]
    return told
