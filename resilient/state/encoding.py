"""State that is no array, as JSON: what `state_dict()` of schedulers, data loaders and the like returns, and nothing that is code.

Owns the translation there and back. JSON's own values stay as they are; anything else is an object with one member, whose name
begins with `$` and says what it is. Reading needs no pickle and runs nothing.
"""

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from checkpoint.state import JSON
from resilient.state.dense import reason_against

MOST_NESTED = 64
_ON_DEVICE = "$device_tensor"  # one that is not in the host's memory


def encode(value: Any, where: str = "state", _depth: int = 0) -> JSON:
    """A value as JSON: None, numbers, text, bytes, lists, tuples, sets, dicts, Counters, torch's and NumPy's arrays and types.

    Raises TypeError, naming the place, for anything else; ValueError for what is nested too deep, or contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value  # type: ignore[no-any-return]
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if _depth > MOST_NESTED:
        raise ValueError(f"{where:.200} is nested more than {MOST_NESTED} deep")
    if kind is list:
        return [encode(each, f"{where}[{number}]", _depth + 1) for number, each in enumerate(value)]
    if kind in (tuple, set, frozenset):
        items = list(value) if kind is tuple else sorted(value, key=repr)
        return {f"${kind.__name__}": [encode(each, f"{where}[{number}]", _depth + 1) for number, each in enumerate(items)]}
    if kind is Counter:  # as torch's MultiStepLR has one
        return {"$counter": _pairs(value, where, _depth)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, _depth)
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"$array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$number": [value.dtype.str, _text(value.tobytes())]}
    if isinstance(value, bytes | bytearray):
        return {f"${kind.__name__}": _text(bytes(value))}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    plain: Any
    for plain in (list, tuple, str, int, float):  # of a class of its own, which is not kept
        if isinstance(value, plain):
            return encode(plain(value), where, _depth + 1)
    raise TypeError(f"{where:.200} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle")


def decode(value: JSON, device: torch.device | str = "cpu") -> Any:
    """What `encode` was given. Raises ValueError for what it has not made.

    Args:
        device: of the tensors that were not in the host's memory.
    """
    if isinstance(value, list):
        return [decode(each, device) for each in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((name, content),) = value.items()
        if name.startswith("$"):
            try:
                found = _CONTAINERS[name](decode(content, device)) if name in _CONTAINERS else _DECODERS[name](content)
            except (KeyError, TypeError, AttributeError, RuntimeError) as error:
                raise ValueError(f"a saved value is damaged: {name}: {error!r}") from None
            return found.to(device) if name == _ON_DEVICE else found
    return {key: decode(each, device) for key, each in value.items()}


def _encode_mapping(value: Mapping[Any, Any], where: str, depth: int) -> JSON:
    if all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$")):
        return {key: encode(each, f"{where}[{key!r}]", depth + 1) for key, each in value.items()}
    return {"$dict": _pairs(value, where, depth)}


def _pairs(value: Mapping[Any, Any], where: str, depth: int) -> list[JSON]:
    return [[encode(key, where, depth + 1), encode(each, f"{where}[{key!r}]", depth + 1)] for key, each in value.items()]


def _encode_tensor(value: torch.Tensor, where: str) -> JSON:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{where:.200} is a {type(value).__name__}; give the module that it belongs to, so that it is saved as an array"
        )
    name = "$tensor" if value.device.type == "cpu" else _ON_DEVICE
    value = value.detach().resolve_conj().resolve_neg()
    if (why := reason_against(value)) is not None:
        raise TypeError(f"{where:.200} is {why}")
    data = torch.empty(value.shape, dtype=value.dtype).copy_(value)  # .contiguous() leaves one element with any stride
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {name: [str(data.dtype).removeprefix("torch."), list(data.shape), _text(raw)]}


def _decode_tensor(content: Any) -> torch.Tensor:
    name, shape, text = content
    dtype = _dtype(name)
    raw = base64.b64decode(text, validate=True)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _decode_array(content: Any) -> np.ndarray[Any, Any]:
    dtype, shape, text = content
    return np.frombuffer(base64.b64decode(text, validate=True), _number_type(dtype)).reshape(shape).copy()


def _decode_number(content: Any) -> Any:
    dtype, text = content
    return np.frombuffer(base64.b64decode(text, validate=True), _number_type(dtype))[0]


def _number_type(text: str) -> np.dtype[Any]:
    found = np.dtype(str(text))
    if found.kind not in "biufc":
        raise ValueError(f"{text!r:.40} is no type of numbers")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r:.40} is no type of torch's")
    return found


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$bytearray": lambda content: bytearray(base64.b64decode(content, validate=True)),
    "$tensor": _decode_tensor,
    _ON_DEVICE: _decode_tensor,
    "$array": _decode_array,
    "$number": _decode_number,
    "$dtype": _dtype,
}

_CONTAINERS: dict[str, Callable[[Any], Any]] = {  # of what was decoded
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
