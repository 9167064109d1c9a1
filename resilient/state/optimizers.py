"""The states of optimizers: which tensors they keep for each parameter, and how these are made again to be loaded into.

Owns the *table* of an optimizer, which travels with a checkpoint: from it a fresh optimizer gets states of the right shapes without
having taken a step. States of a parameter's shape lie as the parameter does; the many numbers of one kind, as the counts of steps,
are one array.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from checkpoint.state import JSON
from resilient.state.dense import reason_against
from resilient.state.encoding import decode, encode

_EARLIER_MARK = "$on_device"  # key by which snapshots of earlier versions mark a tensor that was on a GPU

LIKE, NUMBER, OWN = "like", "number", "own"  # of the parameter's shape; without dimensions; of another shape


@dataclass(frozen=True)
class Entry:
    """States of one name and kind, which these parameters have.

    Attributes:
        key: the optimizer's name of them.
        form: LIKE, NUMBER or OWN.
        dtype: torch's name.
        shape: of OWN.
        on_host: they lie in the host's memory, wherever the parameter does.
        parameters: by their place in the optimizer; None for all of them.
    """

    key: str
    form: str
    dtype: str
    shape: tuple[int, ...]
    on_host: bool
    parameters: tuple[int, ...]


Table = tuple[Entry, ...]


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All of its parameters, in the order of its groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def table_of(optimizer: Optimizer) -> Table:
    """What it keeps in tensors by now. Raises ValueError for one that cannot be saved."""
    found: dict[tuple[str, str, str, tuple[int, ...], bool], list[int]] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        for key, value in _state(optimizer, parameter).items():
            if isinstance(value, torch.Tensor):
                if (why := reason_against(value)) is not None:
                    raise ValueError(f"{key} of parameter {number} of an optimizer is {why}")
                form = NUMBER if value.dim() == 0 else LIKE if value.shape == parameter.shape else OWN
                shape = tuple(value.shape) if form == OWN else ()
                kind = (key, form, str(value.dtype).removeprefix("torch."), shape, value.device.type == "cpu")
                found.setdefault(kind, []).append(number)
    return tuple(Entry(*kind, tuple(numbers)) for kind, numbers in sorted(found.items()))


def keys_of(optimizer: Optimizer) -> list[tuple[int, list[str]]]:
    """For each of its parameters, which may be others by now, its identity and under which keys tensors are kept for it."""
    states = ((id(parameter), _state(optimizer, parameter)) for parameter in parameters_of(optimizer))
    return [(who, [key for key, value in state.items() if isinstance(value, torch.Tensor)]) for who, state in states]


def as_json(table: Table, count: int) -> JSON:
    """A table as it travels. Args: count: of the optimizer's parameters."""
    every = tuple(range(count))
    return [
        [
            each.key,
            each.form,
            each.dtype,
            list(each.shape),
            each.on_host,
            None if each.parameters == every else list(each.parameters),
        ]
        for each in table
    ]


def from_json(found: Any, count: int) -> Table:
    """What `as_json` gave. Raises ValueError for anything else, or where it has more parameters than there are."""
    try:
        table = tuple(
            Entry(str(key), str(form), str(dtype), tuple(map(int, shape)), bool(on_host), _numbers(numbers, count))
            for key, form, dtype, shape, on_host, numbers in found
        )
    except (TypeError, KeyError) as error:
        raise ValueError(f"the table of an optimizer's states is damaged: {error!r}") from None
    if any(each.form not in (LIKE, NUMBER, OWN) for each in table):
        raise ValueError("the table of an optimizer's states has a form that is not known")
    return table


def _numbers(found: Sequence[int] | None, count: int) -> tuple[int, ...]:
    numbers = tuple(range(count)) if found is None else tuple(map(int, found))
    if any(not 0 <= number < count for number in numbers):
        raise ValueError(f"the checkpoint's optimizer has a parameter {max(numbers)}, and this one has {count}")
    return numbers


def make(optimizer: Optimizer, table: Table) -> None:
    """Give the optimizer the states of a table, of zeros where it has none of that shape."""
    parameters = parameters_of(optimizer)
    for entry in table:
        dtype = getattr(torch, entry.dtype)
        for number in entry.parameters:
            parameter = parameters[number]
            states = optimizer.state[parameter]
            there = states.get(entry.key)
            shape = {LIKE: parameter.shape, NUMBER: torch.Size(), OWN: torch.Size(entry.shape)}[entry.form]
            if isinstance(there, torch.Tensor) and (there.shape, there.dtype) == (shape, dtype):
                continue
            with torch.no_grad():
                if entry.form == LIKE:
                    states[entry.key] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
                else:
                    device = "cpu" if entry.on_host else parameter.device
                    states[entry.key] = torch.zeros(shape, dtype=dtype, device=device)


def state_tensor(optimizer: Optimizer, parameter: torch.Tensor, key: str) -> torch.Tensor:
    """What is there now. Raises KeyError where nothing is."""
    found: torch.Tensor = optimizer.state[parameter][key]
    return found


def number_of(value: torch.Tensor) -> torch.Tensor:
    """A state without dimensions, as a plain tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def options(optimizer: Optimizer, what: str) -> JSON:
    """The options of its groups, as learning rates. Raises TypeError for what cannot be saved."""
    return [
        {key: encode(value, f"{what}.param_groups[{number}][{key!r}]") for key, value in group.items() if key != "params"}
        for number, group in enumerate(optimizer.param_groups)
    ]


def set_options(optimizer: Optimizer, found: Any) -> None:
    """Set what `options` gave. Raises ValueError where the optimizer has other groups."""
    if not isinstance(found, list) or len(found) != len(optimizer.param_groups):
        count = len(found) if isinstance(found, list) else 0
        raise ValueError(f"the checkpoint's optimizer has {count} groups of parameters, and this one {len(optimizer.param_groups)}")
    for group, saved in zip(optimizer.param_groups, found, strict=True):
        for key, value in saved.items():
            new, old = decode(value), group.get(key)
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.shape == new.shape:
                with torch.no_grad():
                    old.copy_(new)
            else:
                group[key] = new


def other_states(optimizer: Optimizer) -> dict[Any, Any]:
    """States that are in no table: by the parameter's place those that are no tensors, and by their keys those of no parameter.

    Raises ValueError for a key that would be taken for a parameter's place.
    """
    found: dict[Any, Any] = {}
    for number, parameter in enumerate(parameters_of(optimizer)):
        plain = {key: value for key, value in _state(optimizer, parameter).items() if not isinstance(value, torch.Tensor)}
        if plain:
            found[number] = plain
    for key, value in optimizer.state.items():
        if isinstance(key, int):
            raise ValueError(f"an optimizer has a state under the number {key}, which cannot be told from that of a parameter")
        if not isinstance(key, torch.Tensor):  # a tensor that is no parameter any more has no meaning
            found[key] = value
    return found


def set_other_states(optimizer: Optimizer, found: Mapping[Any, Any]) -> None:
    """Set what `other_states` gave, tensors on a GPU on that of their parameter."""
    parameters = parameters_of(optimizer)
    for key, value in found.items():
        if isinstance(key, int):
            optimizer.state[parameters[key]].update(_moved(value, parameters[key].device))
        else:
            optimizer.state[key] = _moved(value, parameters[0].device)


def _moved(value: Any, device: torch.device) -> Any:
    """A state whose tensors on a GPU are on this one."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else value.to(device)
    if isinstance(value, dict) and value.keys() == {_EARLIER_MARK}:
        return value[_EARLIER_MARK].to(device)
    if isinstance(value, dict):  # or a Counter
        return type(value)({key: _moved(each, device) for key, each in value.items()})
    return type(value)(_moved(each, device) for each in value) if type(value) in (list, tuple) else value


def _state(optimizer: Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    found: Mapping[str, Any] = optimizer.state.get(parameter, {})
    return found
