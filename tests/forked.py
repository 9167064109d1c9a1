"""The fork server of the session: all processes of tests that need PyTorch come out of it, so that one costs milliseconds.

There is one for all test modules, because a second list of what it imports would be ignored or take the first one's place.
"""

import multiprocessing
from collections.abc import Callable
from functools import cache
from multiprocessing.context import ForkServerProcess
from typing import Any

from costs import METER

from trainer.main import PRELOAD

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *PRELOAD,
        *("checkpoint.dcp", "checkpoint.newest", "checkpoint.tiers.keeper", "torch.distributed.checkpoint.state_dict"),
        *("numpy.ma", "pytest", "hypothesis"),
    ]
)


def _nothing() -> None:
    pass


@cache
def _warm() -> None:
    """Wait until the server has imported everything; no test is charged for that."""
    with METER.sharing("the fork server's imports"):
        process = CONTEXT.Process(target=_nothing)
        process.start()
        process.join()


def forked(function: Callable[..., Any], *args: Any, daemon: bool = True) -> ForkServerProcess:
    """A process that runs `function(*args)`, started."""
    _warm()
    process = CONTEXT.Process(target=function, args=args, daemon=daemon)
    process.start()
    return process
