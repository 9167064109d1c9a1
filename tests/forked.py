"""The fork server of the session: all processes of tests that need PyTorch come out of it, so that one costs milliseconds.

There is one for all test modules, because a second list of what it imports would be ignored or take the first one's place.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

from costs import METER

from trainer.main import PRELOAD

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *PRELOAD,
        *("checkpoint.dcp", "checkpoint.newest", "checkpoint.daemon.__main__", "torch.distributed.checkpoint.state_dict"),
        *("numpy.ma", "pytest", "hypothesis"),
        # What the functions that are run are defined in or need; the server passes over what cannot be found.
        *("checkpoint_processes", "checkpoint_state", "daemon_lab", "lab_children", "trainer_ranks"),
        "frozen",  # the last one
    ]
)


def _nothing() -> None:
    pass


@cache
def _warm() -> None:
    """Wait until the server has imported everything; no test is charged for that."""
    here = [path for path in sys.path if Path(path).is_relative_to(Path(__file__).parent)]
    found = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    with METER.sharing("the fork server's imports"):
        with mock.patch.dict(os.environ, {"PYTHONPATH": found}):  # before 3.13 the server has no other way to be told of them
            forkserver.ensure_running()
        process = CONTEXT.Process(target=_nothing)
        process.start()
        process.join()


def forked(function: Callable[..., Any], *args: Any, daemon: bool = True) -> ForkServerProcess:
    """A process that runs `function(*args)`, started."""
    _warm()
    process = CONTEXT.Process(target=function, args=args, daemon=daemon)
    process.start()
    return process
