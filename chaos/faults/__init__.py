"""The catalogue: every file of this folder is one kind of fault, and has its name."""

import importlib
import pkgutil
from functools import cache

from chaos.fault import Fault, Inside, Outside


@cache
def names() -> tuple[str, ...]:
    """All kinds of faults."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def kind(name: str) -> type[Fault]:
    """The class of a fault.

    Raises:
        KeyError: there is none of this name.
    """
    if name not in names():
        raise KeyError(name)
    module = importlib.import_module(f"{__name__}.{name}")
    found = [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, Fault)
        and each not in (Fault, Inside, Outside)
        and each.__module__ == module.__name__
    ]
    (only,) = found
    return only
