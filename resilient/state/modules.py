"""The tensors of a model, where they are found again at every step, under the names that `torch.distributed.checkpoint` gives them.

Owns the walk over modules: what DDP, torch.compile and activation checkpointing put around a module leaves its name as it was. What
`get_model_state_dict` knows beyond parameters and buffers (extra states) is kept as its *rest*.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from checkpoint import safe_name
from checkpoint.dcp_names import TENSORS, array_name
from resilient.state.dense import reason_against

MODEL = "model/"
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Slot:
    """Where a tensor of a module is: looked up again at every step, for it may be replaced.

    Attributes:
        name: of its array: group, and name in the model.
        home: of the module, its parameters or its buffers.
        key: there.
        is_buffer: no parameter.
    """

    name: str
    home: Mapping[str, Any]
    key: str
    is_buffer: bool

    def tensor(self) -> torch.Tensor:
        """What is there now."""
        found: torch.Tensor = self.home[self.key]
        return found


class ModelTensors:
    """A model's parameters and persistent buffers, each once however often it is tied, and the rest of its state.

    Args:
        group: put before all names; ends in "/".

    Raises ValueError where a tensor cannot be saved (`dense`) or its name is too long, or the model is sharded by
    FullyShardedDataParallel, whose parameters are no arrays.
    """

    def __init__(self, model: Module, group: str = MODEL) -> None:
        self.model = model
        self.reshard()
        seen: set[int] = set()
        walked: dict[str, Mapping[str, Any]] = {}
        self.slots: list[Slot] = []
        for slot in _walk(model, ""):
            tensor = slot.tensor()
            walked[slot.name] = slot.home
            if (why := reason_against(tensor)) is not None:
                raise ValueError(f"{group}{slot.name} is {why}")
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self.slots.append(replace(slot, name=safe_name.array_name(group + node_name(slot.name), tensor.shape)))
        self._walked, self.group = walked, group
        self._forms = [_form(slot.tensor()) for slot in self.slots]
        state = get_model_state_dict(model) if model.state_dict() else {}  # which it does not take where nothing is
        self._rest = sorted(set(state) - walked.keys())

    def reshard(self) -> None:
        """Have FSDP give up what it has gathered: after a validation, the root's parameters are whole."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def accept_added_names(self) -> list[str]:
        """The names of parameters and buffers that the model did not have before; from now on it had them."""
        added = {slot.name: slot.home for slot in _walk(self.model, "") if slot.name not in self._walked}
        self._walked.update(added)
        return [self.group + name for name in added]

    def unexpected(self) -> str | None:
        """What the model has that is not saved, of which nothing is gone; None if all is as it was."""
        for slot in _walk(self.model, ""):
            home = self._walked.get(slot.name)
            if home is None:
                return f"{self.group}{slot.name} has come: make it before resilient.attach"
            if home is not slot.home:
                return f"{self.group}{slot.name} is in another module than before: replace modules before resilient.attach"
        return None

    def changed_form(self) -> str | None:
        """The first tensor that has another type, shape or kind than when this was made; None if none has."""
        self.reshard()
        for slot, before in zip(self.slots, self._forms, strict=True):
            tensor = slot.home.get(slot.key)
            if isinstance(tensor, torch.Tensor) and (now := _form(tensor)) != before:
                return (
                    f"{slot.name} was {before} when resilient.attach was called, and is {now} after the first step: convert and "
                    "shard the model before resilient.attach"
                )
        return None

    def plain_forms(self) -> list[str]:
        """Names, types and shapes of the tensors that are no DTensors, which are the same on all ranks."""
        found = ((slot.name, slot.home.get(slot.key)) for slot in self.slots)
        tensors = ((name, each) for name, each in found if isinstance(each, torch.Tensor) and not isinstance(each, DTensor))
        return [f"{name} {_form(each)}" for name, each in tensors]

    def parameter_names(self) -> list[str]:
        """Of all parameters, each once."""
        return [slot.name for slot in self.slots if not slot.is_buffer]

    def trained(self) -> str:
        """Which of them are trained: a character of each, "1" if it requires gradients."""
        return "".join("1" if slot.tensor().requires_grad else "0" for slot in self.slots if not slot.is_buffer)

    def rest(self) -> dict[str, Any]:
        """What the model's state has beyond parameters and buffers. Raises ValueError where a part of that has gone."""
        if not self._rest:
            return {}
        found = get_model_state_dict(self.model)
        if gone := [name for name in self._rest if name not in found]:
            raise ValueError(f"{self.group}{gone[0]} is gone")
        return {name: found[name] for name in self._rest}

    def load_rest(self, rest: Mapping[str, Any]) -> None:
        """Set what `rest` gave."""
        if rest:
            set_model_state_dict(self.model, dict(rest), options=StateDictOptions(strict=False))


def _form(tensor: torch.Tensor) -> str:
    kind = " (DTensor)" if isinstance(tensor, DTensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{kind}"


def node_name(name: str) -> str:
    """A name as that of a Zarr array."""
    return array_name(name).removeprefix(f"{TENSORS}/")


def _walk(module: Module, path: str) -> Iterator[Slot]:
    """Parameters and persistent buffers, those of a module before those of its children."""
    if type(module).__name__ == "FullyShardedDataParallel":
        raise ValueError(
            f"{path or 'the model'} is sharded by FullyShardedDataParallel, whose flat parameters are no arrays; shard it by "
            "torch.distributed.fsdp.fully_shard"
        )
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield Slot(path + key, module._parameters, key, False)
    for key, buffer in module._buffers.items():
        if buffer is not None and key not in module._non_persistent_buffers_set:
            yield Slot(path + key, module._buffers, key, True)
    for name, child in module._modules.items():  # named_children leaves out the second name of a module that is there twice
        if child is None:
            continue
        wraps = name in _WRAPPERS or (name == "module" and isinstance(module, DistributedDataParallel))
        yield from _walk(child, path if wraps else f"{path}{name}.")
