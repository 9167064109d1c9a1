"""Imported once by the fork server, so that the workers it forks find everything imported.

It must not raise (that would kill the server), start threads, or touch a GPU (neither survives a fork).
"""

import gc
import importlib
import logging
import os
from collections.abc import Sequence

from resilient.lifeline import die_with_parent, leave_stops_to_the_driver

MODULES_VARIABLE = "RESILIENT_PRELOAD"
AGENT_VARIABLE = "RESILIENT_AGENT_PID"

log = logging.getLogger("resilient.preload")


def preload(entry_modules: Sequence[str]) -> None:
    """Import the modules of the entry point and what their `PRELOAD` names.

    A module that cannot be imported is left to the worker, which will fail with a traceback in its own log.
    """
    names = ["torch", "torch.distributed", "torch._dynamo", "resilient.health.node", *entry_modules]
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything, and the server must live
            log.warning("cannot import %s ahead of the workers: %s: %s", name, type(error).__name__, error)
            continue
        if name in entry_modules:
            names.extend(getattr(module, "PRELOAD", ()))
    # What is there now stays: a collection in a worker would touch, and so copy, every page of it.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - counts, makes no paths
    if threads > 1:
        log.warning("importing %s started %d threads, which forked workers will not have", ", ".join(entry_modules), threads - 1)


if AGENT_VARIABLE in os.environ:
    leave_stops_to_the_driver()
    die_with_parent(int(os.environ[AGENT_VARIABLE]))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    preload([name for name in os.environ[MODULES_VARIABLE].split(",") if name])
