"""Values of `extra` that go on: a script's own variables have what was saved wherever they name the same list, dict, set or tensor.

Owns which of them are changed in place. What a script names twice, or shares with a model, is replaced instead: it may be two
things by now.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from resilient.state import randomness


class Restoring:
    """One restoration.

    Args:
        extra: what is restored.
        tensors: of the models, which are not changed by way of `extra`.
    """

    def __init__(self, extra: Any, tensors: Iterable[torch.Tensor]) -> None:
        self._names = Counter(map(_place, (*_within(extra), *tensors)))

    def restored(self, value: Any, state: Any) -> Any:
        """What takes the place of a value: itself, with what was saved in it, or what was saved."""
        if randomness.generator_state(value) is not None:
            randomness.set_generator(value, state)
            return value
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(state)
            return value
        if isinstance(value, MutableMapping) and isinstance(state, Mapping):
            found = {key: self.restored(value[key], each) if key in value else each for key, each in state.items()}
            if type(value) is dict and self._is_shared(value):
                return found
            value.clear()
            value.update(found)
            return value
        if isinstance(state, tuple) and hasattr(value, "_make"):  # a named tuple
            return value._make(state)
        if isinstance(value, torch.Tensor) and isinstance(state, torch.Tensor):
            return self._tensor(value, state)
        if type(value) is type(state) and not self._is_shared(value):
            return self._same_kind(value, state)
        return state

    def _tensor(self, value: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        same = (value.shape, value.dtype, value.layout) == (state.shape, state.dtype, state.layout)
        if not same or not value.is_contiguous() or self._is_shared(value):
            return state.to(value.device)
        with torch.no_grad():
            return value.copy_(state)

    def _same_kind(self, value: Any, state: Any) -> Any:
        if isinstance(value, list):
            there = len(value)
            value[:] = [self.restored(value[n], each) if n < there else each for n, each in enumerate(state)]
        elif isinstance(value, set):
            value.clear()
            value.update(state)
        elif isinstance(value, bytearray):
            value[:] = state
        elif isinstance(value, np.ndarray) and value.base is None and (value.shape, value.dtype) == (state.shape, state.dtype):
            value[...] = state
        else:
            return state
        return value

    def _is_shared(self, value: Any) -> bool:
        return self._names[_place(value)] > 1


def _place(value: Any) -> tuple[str, int]:
    """Where a value lies: tensors that are views of one another lie together."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return str(value.device), value.untyped_storage().data_ptr()
    return "", id(value)


def _within(value: Any) -> Iterator[Any]:
    """A value and what is in it, as far as that is changed in place."""
    yield value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for each in inside:
        yield from _within(each)
