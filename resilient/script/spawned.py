"""Processes that a script starts by `torch.multiprocessing.spawn`: they are no ranks, and begin as they would under plain Python.

Owns what they do not inherit. Told that an agent serves the store of their process group, as a rank is, they would wait for it for
ever, since each group of theirs is their own.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

OURS = ("RESILIENT_", "TORCHELASTIC_")  # beginnings of the names of variables that are for ranks


def watch() -> None:
    """Have such processes started without what is for ranks alone, and told of, from now on."""
    package, module = sys.modules.get("torch.multiprocessing"), sys.modules.get("torch.multiprocessing.spawn")
    if package is None or module is None:
        return
    wrapped = _wrapped(module.start_processes)
    module.start_processes = package.start_processes = wrapped  # type: ignore[attr-defined]


def _wrapped(start_processes: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(start_processes)
    def starts(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *more: Any, **others: Any) -> Any:
        log.warning(
            "the script starts %d processes of its own by torch.multiprocessing: they are no ranks, so their steps are not counted "
            "and resilient.attach keeps nothing of them. To have them as ranks, give `resilient run` --procs %d, and have the "
            "script train in its own process by RANK and WORLD_SIZE, as under torchrun",
            nprocs,
            nprocs,
        )
        with _without_ours():
            context = start_processes(fn, args, nprocs, False, *more, **others)
        if not join:
            return context
        while not context.join():
            pass
        return None

    return starts


@contextmanager
def _without_ours() -> Iterator[None]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(OURS)}
    for name in kept:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)
