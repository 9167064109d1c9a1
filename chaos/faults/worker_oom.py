"""A worker uses more memory than its cgroup may."""

import os
import time
from pathlib import Path

from pydantic import Field

from chaos.fault import CannotInject, Expectation, Inside, Need
from chaos.injectors.context import RankContext
from chaos.injectors.guard import Guard
from resilient import worker
from resilient.agent.oom import controller

SEEN_S = 2.0  # for the agent to see that the worker is in the cgroup: it looks every second

# $1: the cgroup. Whoever looks for the reason reads it; and it is in use until its last process has been taken apart.
_REMOVE = 'sleep 2; for _ in $(seq 200); do rmdir "$1" 2>/dev/null && exit; sleep 0.05; done'


class WorkerOom(Inside):
    """A worker allocates until the kernel's OOM killer ends it, in a cgroup of its own with a real limit."""

    needs = frozenset({Need.ROOT})
    undone = "the cgroup is removed when the worker is gone"

    mib: int = Field(256, ge=16, description="that it may still use")

    def expects(self) -> Expectation:
        # The kernel may look for memory to give back for so long that the rank is found hanging before it is killed.
        return Expectation(frozenset({"exit", "hang"}), frozenset({"restart_workers"}), culprit=True)

    def strike(self, context: RankContext) -> None:
        found = controller(Path("/proc/self/mountinfo").read_text())
        if found is None:
            raise CannotInject("no cgroup accounts for memory here")
        group = found.mount / f"resilient-chaos-{os.getpid()}"
        guard = Guard()
        guard.add(["sh", "-c", _REMOVE, "sh", str(group)])
        try:
            group.mkdir()
            (group / ("memory.max" if found.unified else "memory.limit_in_bytes")).write_text(str(self.mib << 20))
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            guard.release()
            raise CannotInject(f"a cgroup with a limit cannot be made: {error}") from error
        until = time.monotonic() + SEEN_S
        while time.monotonic() < until:
            with worker.phase("step"):  # a sign of life
                time.sleep(0.1)
        taken = []
        while True:
            taken.append(b"x" * (1 << 20))
