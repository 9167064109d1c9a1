"""Gradients that add up over several steps of a loop, which no snapshot has: who trains in this way is told once.

Owns what tells them from gradients of a step that was left out, as a gradient scaler does: those are cleared before more is added,
or are not finite.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from resilient.state import optimizers
from resilient.state.modules import ModelTensors

log = logging.getLogger(__name__)

LOOKS = 16  # at gradients that a step has left, each of which waits for a GPU; steps that nobody sees would have one in each


class Accumulation:
    """Of one rank. Optimizers that take no hook are not looked at, and parameters that a script changes by itself are stepped."""

    def __init__(self, models: Sequence[ModelTensors], all_optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = all_optimizers
        self._sharded = [module for each in models for module in each.model.modules() if isinstance(module, FSDPModule)]
        self._watched = bool(all_optimizers) and all(hasattr(each, "_optimizer_step_pre_hooks") for each in all_optimizers)
        self._stepped = False
        self._looks = LOOKS
        self._step = 0  # the last one without an optimizer's step
        self._left: list[tuple[ref[Tensor], int]] = []  # gradients that it has left, and how often they had changed in place
        self._changes = 0  # of all parameters in place, until then
        for each in all_optimizers if self._watched else ():
            each.register_step_pre_hook(self._before_optimizer)

    def end_step(self, step: int) -> None:
        """A step of the loop is over. Args: step: how many are done."""
        stepped, self._stepped = self._stepped, False
        if stepped or not self._watched:
            self._left = []
            return
        if self._have_added_up():
            self._tell()
            return
        self._step, self._changes = step, self._present_changes()
        if any(map(_keeps_gradients, self._sharded)):
            self._tell()
            return
        gradients = list(self._gradients())
        if gradients:
            self._looks -= 1
            self._watched = self._looks > 0
        self._left = [(ref(each), each._version) for each in gradients] if _are_whole(gradients) else []

    def _before_optimizer(self, *_: Any) -> None:
        if not self._stepped and self._watched and self._have_added_up():
            self._tell()
        self._stepped, self._left = True, []

    def _have_added_up(self) -> bool:
        """Whether gradients that an earlier step has left are there still, with something added to them."""
        if not self._left or self._present_changes() != self._changes:
            return False
        before = {id(each): version for gradient, version in self._left if (each := gradient()) is not None}
        return any(each._version != before.get(id(each), each._version) for each in self._gradients())

    def _tell(self) -> None:
        self._watched, self._left = False, []
        log.warning(
            "step %d has left gradients, and no optimizer was seen to step: no snapshot has them. Where gradients add up over "
            "several steps of this loop, make the whole round one step of it, or call after_step behind the optimizer's step alone",
            self._step,
        )

    def _gradients(self) -> Iterator[Tensor]:
        for parameter in self._parameters():
            gradient = parameter.grad
            local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
            if local is not None and local.layout == torch.strided:
                yield local

    def _present_changes(self) -> int:
        return sum(each._version for each in self._parameters())

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for each in self._optimizers for parameter in optimizers.parameters_of(each))


def _are_whole(gradients: Sequence[Tensor]) -> bool:
    """Whether they are finite, and are not only zeros: what a step has left that is to be added to."""
    largest = [float(torch.linalg.vector_norm(each.detach(), math.inf)) for each in gradients if each.numel()]
    return all(map(math.isfinite, largest)) and any(largest)


def _keeps_gradients(module: FSDPModule) -> bool:
    """Whether FSDP has gradients for itself, as in passes without an exchange."""
    groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", ())
    parameters = [each for group in groups for each in group.fsdp_params]
    whole = [getattr(each, "_unsharded_param", None) for each in parameters]
    found = [*(getattr(each, "grad", None) for each in whole), *(each.unsharded_accumulated_grad for each in parameters)]
    return any(each is not None for each in found)
