"""Gradients that add up over several steps of a loop: without them the state of such a step is not whole.

Owns the judgement whether it is, by the optimizers' steps. Gradients are in no snapshot; one that is due waits for the next step of
an optimizer, and so does a stop.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from resilient.state import optimizers
from resilient.state.modules import ModelTensors

log = logging.getLogger(__name__)

MOST_STEPS = 64  # without an optimizer's step: then it steps unseen, as one that is replayed from a CUDA graph does


class Accumulation:
    """Of one rank. An optimizer that takes no hook is not waited for, and a script may change its parameters by itself.

    Attributes:
        whole: whether, at the end of the newest step, no gradients were kept for a later one.
    """

    def __init__(self, models: Sequence[ModelTensors], all_optimizers: Sequence[Optimizer]) -> None:
        self.whole = True
        self._optimizers = all_optimizers
        # In passes without an exchange FSDP keeps the gradients to itself.
        self._sharded = any(isinstance(module, FSDPModule) for each in models for module in each.model.modules())
        self._watched = bool(all_optimizers) and all(hasattr(each, "_optimizer_step_post_hooks") for each in all_optimizers)
        self._stepped = False
        self._steps_without = 0
        self._versions: int | None = (
            None  # of all parameters, at the end of a step without an optimizer's: changes in place raise it
        )
        for each in all_optimizers if self._watched else ():
            each.register_step_post_hook(self._after_optimizer)

    def end_step(self) -> None:
        """A step of the loop is over."""
        stepped, self._stepped = self._stepped, False
        if stepped or not self._watched or not self._has_gradients():
            self._steps_without, self._versions = 0, None
        else:
            before, self._versions = self._versions, sum(each._version for each in self._parameters())
            self._steps_without = self._steps_without + 1 if before in (None, self._versions) else 0
        self.whole = self._steps_without == 0 or self._steps_without > MOST_STEPS
        if self._steps_without == MOST_STEPS + 1:
            log.warning("no optimizer is seen to step: snapshots are taken without gradients that may add up, until one is")

    def _has_gradients(self) -> bool:
        return self._sharded or any(parameter.grad is not None for parameter in self._parameters())

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for each in self._optimizers for parameter in optimizers.parameters_of(each))

    def _after_optimizer(self, *_: Any) -> None:
        self._stepped = True
