"""Averages of weights, as torch.optim.swa_utils.AveragedModel keeps them: who asks is told of each that is updated."""

import functools
from collections.abc import Callable

from torch.nn import Module
from torch.optim.swa_utils import AveragedModel

Listener = Callable[[AveragedModel, Module], None]
_listeners: dict[int, Listener] = {}


def listen(listener: Listener) -> Callable[[], None]:
    """Have it called with each average that is updated, and the model that it is of, from now on. Returns: ends that."""
    if not hasattr(AveragedModel.update_parameters, "__wrapped__"):
        AveragedModel.update_parameters = _telling(AveragedModel.update_parameters)  # type: ignore[method-assign]
    key = id(listener)
    _listeners[key] = listener

    def end() -> None:
        _listeners.pop(key, None)

    return end


def _telling(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def updates(self: AveragedModel, model: Module) -> None:
        update(self, model)
        for listener in list(_listeners.values()):
            listener(self, model)

    return updates
