"""Gradients that add up over several steps of a loop: without them the state of such a step is not whole.

Owns the judgement whether it is, by the optimizers' steps. Gradients are in no snapshot; one that is due waits for the next step of
an optimizer, and so does a stop.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from resilient.state import optimizers
from resilient.state.modules import ModelTensors

log = logging.getLogger(__name__)

MOST_STEPS = 256  # without an optimizer's step, and it is taken for one that nobody is told of, as one replayed from a CUDA graph


class Accumulation:
    """Of one rank. An optimizer that takes no hook is not waited for.

    Attributes:
        whole: whether, at the end of the newest step, no gradients were kept for a later one.
    """

    def __init__(self, models: Sequence[ModelTensors], all_optimizers: Sequence[Optimizer]) -> None:
        self.whole = True
        self._optimizers = all_optimizers
        # In passes without an exchange FSDP keeps the gradients to itself.
        self._sharded = any(isinstance(module, FSDPModule) for each in models for module in each.model.modules())
        self._watched = bool(all_optimizers) and all(hasattr(each, "register_step_post_hook") for each in all_optimizers)
        self._stepped = False
        self._steps_without = 0
        for each in all_optimizers if self._watched else ():
            each.register_step_post_hook(self._after_optimizer)

    def end_step(self) -> None:
        """A step of the loop is over."""
        stepped, self._stepped = self._stepped, False
        self.whole = stepped or not self._watched or not self._has_gradients()
        self._steps_without = 0 if self.whole else self._steps_without + 1
        if self._steps_without > MOST_STEPS:
            log.warning("no optimizer is seen to step: from now on snapshots are taken of every step, without its gradients")
            self.whole, self._watched = True, False

    def _has_gradients(self) -> bool:
        parameters = (parameter for each in self._optimizers for parameter in optimizers.parameters_of(each))
        return self._sharded or any(parameter.grad is not None for parameter in parameters)

    def _after_optimizer(self, *_: Any) -> None:
        self._stepped = True
