"""Gradients that add up over several steps of a loop, which no snapshot has: who trains in this way is told once."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from resilient.state import optimizers
from resilient.state.modules import ModelTensors

log = logging.getLogger(__name__)


class Accumulation:
    """Of one rank. Optimizers that take no hook are not looked at, and parameters that a script changes by itself are stepped."""

    def __init__(self, models: Sequence[ModelTensors], all_optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = all_optimizers
        # In passes without an exchange FSDP keeps the gradients to itself.
        self._sharded = any(isinstance(module, FSDPModule) for each in models for module in each.model.modules())
        self._watched = bool(all_optimizers) and all(hasattr(each, "_optimizer_step_post_hooks") for each in all_optimizers)
        self._stepped = False
        self._versions: int | None = (
            None  # of all parameters, at the end of a step without an optimizer's: changes in place raise it
        )
        for each in all_optimizers if self._watched else ():
            each.register_step_post_hook(self._after_optimizer)

    def end_step(self, step: int) -> None:
        """A step of the loop is over. Args: step: how many are done."""
        stepped, self._stepped = self._stepped, False
        if stepped or not self._watched or not self._has_gradients():
            self._versions = None
            return
        before, self._versions = self._versions, sum(each._version for each in self._parameters())
        if before not in (None, self._versions):
            return
        self._watched = False
        log.warning(
            "step %d has left gradients, and no optimizer was seen to step: no snapshot has them. Where gradients add up over "
            "several steps of this loop, make the whole round one step of it, or call after_step behind the optimizer's step alone",
            step,
        )

    def _has_gradients(self) -> bool:
        return self._sharded or any(parameter.grad is not None for parameter in self._parameters())

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for each in self._optimizers for parameter in optimizers.parameters_of(each))

    def _after_optimizer(self, *_: Any) -> None:
        self._stepped = True
