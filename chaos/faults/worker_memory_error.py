"""A worker gets no more memory."""

import resource
from pathlib import Path

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class WorkerMemoryError(Inside):
    """A worker gets no more memory from the system (RLIMIT_AS), and raises MemoryError; the OOM killer has no part in it."""

    mib: int = Field(64, ge=1, description="that it still gets")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"exception"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (self.mib << 20), before[1]))
        taken = []
        try:
            while True:
                taken.append(bytearray(1 << 20))
        finally:
            # The worker must be able to say what has happened.
            taken.clear()
            resource.setrlimit(resource.RLIMIT_AS, before)
