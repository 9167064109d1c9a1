"""What a script trains with and no snapshot has: each is told once.

Owns what is looked at: optimizers, averages, schedulers, gradient scalers and communication hooks that `attach` was not given,
gradients and buffers that nobody saves, and parameters that are frozen where they were not before. It is made after the first
step, when all of these are there; it changes nothing, and what it cannot know it leaves unsaid.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel

from resilient.state import averages, optimizers
from resilient.state.arrays import sum_of_bits
from resilient.state.modules import ModelTensors
from resilient.state.randomness import generator_state

log = logging.getLogger(__name__)

TEXTS = {
    "optimizer": "an optimizer that resilient.attach was not given, %s, trains parameters that are saved: no snapshot has its "
    "state. Make all optimizers before resilient.attach, and give them as a list",
    "aside": "an optimizer that resilient.attach was not given, %s, trains parameters that no snapshot has: they begin anew after "
    "a restart. Give their module as a value of the dict extra, and the optimizer with the others, as a list",
    "average": "an average of weights that resilient.attach was not given, %s, is updated: no snapshot has it, and it begins anew "
    "after a restart. Give it as a value of the dict extra",
    "scheduler": "optimizer %d has a scheduler that resilient.attach was not given: no snapshot has its position, and it begins "
    "anew after a restart. Give it as scheduler, or a list of all",
    "scaler": "the optimizer is stepped by a %s that resilient.attach was not given: no snapshot has its scale. Give it as a "
    "value of the dict extra",
    "hook": "the communication hook %s of DistributedDataParallel has a state, a %s: no snapshot has it, and it begins anew "
    "after a restart. Give something with state_dict and load_state_dict for it, as a value of the dict extra",
    "gradients": "no optimizer that resilient.attach was given has %s, and gradients are kept there from step to step: no "
    "snapshot has them, and what they count in, as clipping by the norm of all gradients, is another after a restart."
    " Freeze by requires_grad_(False) what is not trained, or clear all gradients with model.zero_grad()",
    "buffers": "no snapshot has buffers that are not persistent, and there is something else than in the first step in %s. Where"
    " that is more than a cache, call register_buffer with persistent=True",
    "frozen": "requires_grad of %s was on when the snapshot was taken, and is off in the first step after it: it is in no "
    "snapshot. Set it by the number of the step, and not once when a step comes",
    "trained": "requires_grad of %s was off when the snapshot was taken, and is on in the first step after it: it is in no "
    "snapshot. Set it by the number of the step, and not once when a step comes",
}
FRAMES = 10  # above an optimizer's step, in which a gradient scaler is looked for


class Unsaved:
    """Of one rank, from its first step on.

    Args:
        extra: as `attach` was given it; what has a state of its own there, of a class that nobody knows, may have anything in it.
        trained: which parameters of each model were trained when the snapshot was taken from which this attempt went on, see
            `ModelTensors.trained`; None if it began anew.
    """

    def __init__(
        self,
        models: Sequence[ModelTensors],
        all_optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        extra: Any,
        trained: Sequence[str] | None,
    ) -> None:
        self._models, self._optimizers = models, all_optimizers
        values = list(extra.values()) if isinstance(extra, Mapping) else [extra]
        self._given = {id(each) for each in (*values, *all_optimizers)}
        self._states = {id(each.state) for each in all_optimizers}  # one that stands around another has its state
        self._may_be_given = any(map(_is_unknown, values))
        self._told: set[str] = set()
        self._seen: set[int] = set()  # optimizers, by id
        self._steps = 0
        self._aside: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # of other parameters, by the step of their first
        optimized = {id(parameter) for each in all_optimizers for parameter in optimizers.parameters_of(each)}
        parameters = [slot for model in models for slot in model.slots if not slot.is_buffer]
        self._parameters = {id(slot.tensor()) for slot in parameters}
        self._free = [slot for slot in parameters if id(slot.tensor()) not in optimized] if all_optimizers else []
        self._gradients: dict[str, ref[torch.Tensor]] = {}
        self._buffers = {name: (tuple(buffer.shape), _bits(buffer)) for name, buffer in self._present_buffers()}
        if not self._may_be_given and all(hasattr(each, "optimizer") for each in schedulers):
            self._look_at_schedulers([*schedulers, *values])
        self._look_at_hooks()
        if trained is not None:
            self._look_at_trained(trained)
        self._hook = register_optimizer_step_post_hook(self._after_optimizer)
        self._end_averages = averages.listen(self._after_average)

    def close(self) -> None:
        """The loop is over: what the script trains now is something else."""
        self._hook.remove()
        self._end_averages()

    def end_step(self) -> None:
        """A step of the loop is over."""
        self._steps += 1
        if "gradients" in self._told:
            return
        before, self._gradients = self._gradients, {}
        kept = []
        for slot in self._free:
            gradient = slot.tensor().grad if slot.key in slot.home else None
            if gradient is not None:
                self._gradients[slot.name] = ref(gradient)
                if slot.name in before and before[slot.name]() is gradient:
                    kept.append(slot.name)
        if kept:
            self._tell("gradients", _named(kept))

    def snapshot(self, count: int) -> None:
        """A snapshot is taken. Args: count: how many were, with this one; buffers are looked at seldom."""
        if count & (count - 1) or "buffers" in self._told:
            return
        changed = []
        for name, buffer in self._present_buffers():
            before = self._buffers.get(name)
            if before is not None and before[0] == tuple(buffer.shape) and before[1] != _bits(buffer):
                changed.append(name)
        if changed:
            self._tell("buffers", _named(changed))

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in self._seen:
            return
        given = id(optimizer) in self._given or id(optimizer.state) in self._states
        if not given and not any(id(each) in self._parameters for each in optimizers.parameters_of(optimizer)):
            self._look_at_aside(optimizer)
            return
        self._seen.add(id(optimizer))
        self._look_at_scaler()
        if not given and not self._may_be_given:
            self._tell("optimizer", _kind(optimizer))

    def _look_at_aside(self, optimizer: Optimizer) -> None:
        """What is trained in one step of the loop alone, as an attack on the model, need not be saved."""
        if self._aside.setdefault(optimizer, self._steps) != self._steps and not self._may_be_given:
            self._tell("aside", _kind(optimizer))

    def _after_average(self, average: AveragedModel, model: Module) -> None:
        saved = id(average) in self._given or any(id(each) in self._parameters for each in average.parameters())
        if not saved and not self._may_be_given and any(id(each) in self._parameters for each in model.parameters()):
            self._tell("average", _kind(average))

    def _look_at_scaler(self) -> None:
        frame = sys._getframe(2)
        for _ in range(FRAMES):
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, GradScaler) and scaler.is_enabled():
                if id(scaler) not in self._given and not self._may_be_given:
                    self._tell("scaler", _kind(scaler))
                return
            if frame.f_back is None:
                return
            frame = frame.f_back

    def _look_at_schedulers(self, given: Sequence[Any]) -> None:
        """An optimizer's `step` tells whether a scheduler of torch was made for it."""
        scheduled = {id(each.optimizer) for each in given if hasattr(each, "optimizer")}
        for number, each in enumerate(self._optimizers):
            if hasattr(getattr(each, "step", None), "_wrapped_by_lr_sched") and id(each) not in scheduled:
                self._tell("scheduler", number)

    def _look_at_hooks(self) -> None:
        for module in (each for model in self._models for each in model.model.modules()):
            for hook, state in getattr(module, "_comm_hooks", ()) if isinstance(module, DistributedDataParallel) else ():
                if not (state is None or isinstance(state, dist.ProcessGroup) or id(state) in self._given or self._may_be_given):
                    self._tell("hook", getattr(hook, "__name__", hook), _kind(state))

    def _look_at_trained(self, before: Sequence[str]) -> None:
        for model, then in zip(self._models, before, strict=False):
            names, now = model.parameter_names(), model.trained()
            for was, is_now, word in (("1", "0", "frozen"), ("0", "1", "trained")):
                other = [name for name, *both in zip(names, then, now, strict=False) if both == [was, is_now]]
                if other:
                    self._tell(word, _named(other))

    def _present_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are not persistent."""
        for model in self._models:
            for path, module in model.model.named_modules():
                for key in module._non_persistent_buffers_set:
                    buffer = module._buffers.get(key)
                    if buffer is not None and buffer.device.type != "meta" and buffer.layout == torch.strided:
                        yield f"{model.group}{path}{'.' if path else ''}{key}", buffer

    def _tell(self, what: str, *values: object) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(TEXTS[what], *values)


def _is_known(value: Any) -> bool:
    return isinstance(value, Module | Optimizer | LRScheduler | GradScaler) or generator_state(value) is not None


def _is_unknown(value: Any) -> bool:
    """Whether it has a state of which nobody knows what is in it."""
    return _has_state(value) and not _is_known(value) and not hasattr(value, "optimizer")


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict")


def _named(names: Sequence[str]) -> str:
    others = len(names) - 1
    return names[0] + (f" and {others} {'other' if others == 1 else 'others'}" if others else "")


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _bits(tensor: torch.Tensor) -> int:
    return sum_of_bits(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
