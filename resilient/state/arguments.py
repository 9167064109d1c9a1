"""What `attach` is given: what it has no use for is refused in a sentence, before anything is made of it.

What cannot be saved although its kind is right is told later, by whoever saves it (`encoding`, `modules`).
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from resilient import worker
from resilient.state import randomness

_PLAIN = (str, bytes, int, float, list, tuple, dict, set)  # which have no position


def check(*, model: Any, optimizer: Any, scheduler: Any, extra: Any, loader: Any, group: Any) -> None:
    """Raises UnrecoverableError, naming the argument and its type, for one that `attach` has no use for."""
    if not isinstance(model, Module):
        raise _wrong("model", model, "a torch.nn.Module; further ones are values of the dict extra")
    for name, each in _named("optimizer", optimizer):
        if not (hasattr(each, "param_groups") and hasattr(each, "state")):
            raise _wrong(name, each, "an optimizer of torch, or a list of them")
        if type(each).__name__ == "ZeroRedundancyOptimizer":
            wanted = "an optimizer that has its states itself; torch.distributed.fsdp.fully_shard shares them out among ranks"
            raise _wrong(name, each, wanted)
    for name, each in _named("scheduler", scheduler):
        if not _has_state(each):
            raise _wrong(name, each, "something with state_dict and load_state_dict, or a list of such")
    if not (extra is None or isinstance(extra, Mapping) or _has_state(extra) or randomness.generator_state(extra) is not None):
        raise _wrong("extra", extra, "a dict, or one module, random generator or something with state_dict and load_state_dict")
    for key in extra if isinstance(extra, Mapping) else ():
        if not isinstance(key, str):  # JSON would make one of it
            raise _wrong(f"the key {key!r} of extra", key, "a string")
    if isinstance(loader, _PLAIN):
        raise _wrong("loader", loader, "a loader or a sampler")
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise _wrong("group", group, "a torch.distributed.ProcessGroup of which this rank is a member")


def _named(name: str, given: Any) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, list | tuple):
        return [(f"{name}[{number}]", each) for number, each in enumerate(given)]
    return [(name, given)]


def _has_state(value: Any) -> bool:
    """Whether a state can be asked of it, and given to it; a class is none of its instances."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _wrong(name: str, found: Any, wanted: str) -> worker.UnrecoverableError:
    kind = type(found)
    return worker.UnrecoverableError(f"resilient.attach: {name} is a {kind.__module__}.{kind.__qualname__}, and must be {wanted}")
