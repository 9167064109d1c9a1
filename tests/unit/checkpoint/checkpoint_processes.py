"""Real processes for tests of checkpoints: ranks of a gloo group, and children that may be killed.

All of them are forked from a server that has imported what they need, so that one costs milliseconds.
"""

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import CONTEXT, forked

_PATIENCE_S = 300


class Child:
    """A process of its own with a pipe: `function(connection, *args)`. Ends with the block that it is used in."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = forked(function, theirs, *args)
        theirs.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def receive(self) -> Any:
        """What the child says next. Raises EOFError when it is dead."""
        if not self.pipe.poll(_PATIENCE_S):
            raise TimeoutError("the child says nothing")
        return self.pipe.recv()

    def end(self) -> int:
        """Wait for the child to end; its exit status, negative for a signal."""
        self.process.join(_PATIENCE_S)
        assert self.process.exitcode is not None, "the child does not end"
        return self.process.exitcode


def kill_this_process() -> None:
    """As `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, *args)` on so many ranks of a gloo group; what each returned, or the exception it raised."""
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        ranks = [Child(_rank, store, rank, count, function, args) for rank in range(count)]
        try:
            return [_result(child) for child in ranks]
        finally:
            for child in ranks:
                child.__exit__()


def _result(child: Child) -> Any:
    try:
        return child.receive()
    except EOFError:
        return ChildProcessError(f"died with status {child.end()}")


def _rank(pipe: Connection, store: str, rank: int, count: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    try:
        result = function(rank, *args)
    except Exception as error:  # noqa: BLE001 - the parent decides what it means
        error.add_note(traceback.format_exc())
        result = error
    pipe.send(result)
    pipe.close()
    dist.destroy_process_group()
