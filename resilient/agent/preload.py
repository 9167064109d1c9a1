"""The template of the node's processes: it imports the entry point and what it will need, once.

It must not raise (a module of the user may), start threads, or touch a GPU (neither survives a fork). Owns the order of imports:
the entry point's module comes first, so that the preparation can run beside the rest.
"""

import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from types import ModuleType
from typing import NoReturn

from resilient.agent.template import keep_serving
from resilient.imports.shadowing import import_for_program
from resilient.lifeline import die_with_parent, leave_stops_to_the_driver, name_process

log = logging.getLogger(__name__)

COMMON = ("torch.distributed", "resilient.health.node")  # what every rank needs
CUDA = "/dev/nvidia-uvm"  # open in a process that has started it
DEFAULT = ("torch._dynamo",)  # what an entry point may need that does not say it: torch.optim imports this in the first step


def serve(
    agent: int,
    control: socket.socket,
    entry_modules: Sequence[str],
    fork_preparation: Callable[[], int] | None,
    begin_anew: Callable[[Sequence[str]], NoReturn],
) -> NoReturn:
    """All that the template does, in a process in which torch was imported.

    Args:
        agent: its process id.
        control: to it; see `resilient.agent.template`.
        entry_modules: names, see `resilient.entry.ahead`.
        fork_preparation: forks the preparation and returns its process id; None: another node's agent does that.
        begin_anew: does the same in a process without CUDA, with these modules; the others are left to the ranks.
    """
    leave_stops_to_the_driver()
    die_with_parent(agent)
    name_process("template")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a module that asks whether there is a GPU starts no driver
    modules: list[ModuleType] = []
    for place, name in enumerate(entry_modules):
        modules += _imported([name])
        if _has_started_cuda():
            log.warning("importing %s has started CUDA, which no forked process could use: ranks import it by themselves", name)
            begin_anew(entry_modules[:place])
    preparation = fork_preparation() if fork_preparation is not None else None
    said = [module.PRELOAD for module in modules if hasattr(module, "PRELOAD")]
    _imported([*COMMON, *chain.from_iterable(said or [DEFAULT])])
    _settle(entry_modules)
    keep_serving(control, preparation=preparation)


def _has_started_cuda() -> bool:
    """Whether this process has, by torch or otherwise. Asking NVML which GPUs there are opens other devices, and does no harm."""
    if sys.modules["torch"].cuda.is_initialized():
        return True
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        with suppress(OSError):  # that of the directory itself
            if os.readlink(f"/proc/self/fd/{descriptor}") == CUDA:  # noqa: PTH115
                return True
    return False


def _settle(entry_modules: Iterable[str] = ()) -> None:
    """Ready to be forked from: what is there now is never collected, which would touch, and so copy, every page of it."""
    gc.freeze()
    gc.enable()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - counts, makes no paths
    if threads > 1:
        log.warning("importing %s started %d threads, which forked workers will not have", ", ".join(entry_modules), threads - 1)


def _imported(names: Iterable[str]) -> list[ModuleType]:
    """Those that can be imported; one that cannot is left to the rank, which will fail with a traceback in its own log."""
    found = []
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            found.append(import_for_program(module))
            if attribute:
                _load(found.pop(), attribute)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything, and the template must live
            log.warning("cannot import %s ahead of the workers: %s: %s", name, type(error).__name__, error)
    return found


def _load(module: ModuleType, attribute: str) -> None:
    """As `from module import attribute` does."""
    if not hasattr(module, attribute):
        with suppress(ModuleNotFoundError):
            import_for_program(f"{module.__name__}.{attribute}")
