"""Averages of weights, as torch.optim.swa_utils.AveragedModel keeps them: who asks is told of each that is updated."""

import functools
from collections.abc import Callable
from typing import Any

from torch.optim.swa_utils import AveragedModel

_listeners: dict[int, Callable[[AveragedModel], None]] = {}


def listen(listener: Callable[[AveragedModel], None]) -> Callable[[], None]:
    """Have it called with each average that is updated, from now on. Returns: ends that."""
    if not hasattr(AveragedModel.update_parameters, "__wrapped__"):
        AveragedModel.update_parameters = _telling(AveragedModel.update_parameters)  # type: ignore[method-assign]
    key = id(listener)
    _listeners[key] = listener

    def end() -> None:
        _listeners.pop(key, None)

    return end


def _telling(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def updates(self: AveragedModel, *arguments: Any, **more: Any) -> None:
        update(self, *arguments, **more)
        for listener in list(_listeners.values()):
            listener(self)

    return updates
