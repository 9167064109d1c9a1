"""A worker hangs in the kernel."""

import os
import tempfile
from pathlib import Path

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class HangIo(Inside):
    """A worker hangs in the kernel, as in a read from a file server that is gone: state D, in which only SIGKILL is heard."""

    uninterruptible: bool = Field(True, description="else it waits in a read in state S, and can still say where")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"hang"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        with tempfile.TemporaryDirectory() as directory:
            fifo = Path(directory) / "silent"
            os.mkfifo(fifo)
            silent = os.open(fifo, os.O_PATH)
        hang(f"/proc/{os.getpid()}/fd/{silent}", uninterruptible=self.uninterruptible)


def hang(fifo: str, *, uninterruptible: bool) -> None:
    """Never returns, for nobody ever writes there; its name is in the stacks, where they can be had."""
    if uninterruptible:
        # Who starts a process waits in state D until it executes its program, and before, it must open this.
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, fifo, os.O_RDONLY, 0)])
    os.read(os.open(fifo, os.O_RDWR), 1)
