"""A worker uses more memory than its cgroup may."""

import contextlib
import os
import secrets
import time
from pathlib import Path

from pydantic import Field

from chaos.fault import CannotInject, Expectation, Inside, Need
from chaos.injectors.context import RankContext
from chaos.injectors.guard import Command
from resilient import worker
from resilient.agent.oom import Controller, controller

_NO_CONTROLLER = "no cgroup accounts for memory here"
SEEN_S = 2.0  # for the agent to see that the worker is in the cgroup: it looks every second

# $1: the cgroup. The rank needs a moment to make it, and whoever looks for the reason of its end reads it for another one.
_REMOVE = (
    'sleep 2; for _ in $(seq 600); do grep -q . "$1/cgroup.procs" 2>/dev/null || break; sleep 0.1; done; [ -d "$1" ] || exit 0; '
    'sleep 2; for _ in $(seq 200); do rmdir "$1" 2>/dev/null && exit; sleep 0.05; done; exit 1'
)


class WorkerOom(Inside):
    """A worker allocates until the kernel's OOM killer ends it, in a cgroup of its own with a real limit."""

    needs = frozenset({Need.ROOT})
    undone = "the cgroup is removed when the worker is gone"

    mib: int = Field(256, ge=16, description="that it may still use")

    def expects(self) -> Expectation:
        # The kernel may look for memory to give back for so long that the rank is found hanging before it is killed.
        return Expectation(frozenset({"exit", "hang"}), frozenset({"restart_workers"}), culprit=True)

    def lacks(self) -> str:
        found = controller(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))
        if found is None:
            return _NO_CONTROLLER
        group = _group(found.mount, f"probe-{secrets.token_hex(4)}")
        try:
            _make(group, found, self.mib)
        except CannotInject as error:
            return str(error)
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return ""

    def removal(self, order: str) -> Command | None:
        found = controller(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))
        return None if found is None else ["sh", "-c", _REMOVE, "sh", str(_group(found.mount, order))]

    def strike(self, context: RankContext) -> None:
        found = controller(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))
        if found is None:
            raise CannotInject(_NO_CONTROLLER)
        group = _group(found.mount, context.order)
        _make(group, found, self.mib)
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise CannotInject(f"a cgroup takes no process: {error}") from error
        until = time.monotonic() + SEEN_S
        while time.monotonic() < until:
            with worker.phase("step"):  # a sign of life
                time.sleep(0.1)
        taken = []
        while True:
            taken.append(b"x" * (1 << 20))


def _make(group: Path, found: Controller, mib: int) -> None:
    try:
        group.mkdir()
        (group / ("memory.max" if found.unified else "memory.limit_in_bytes")).write_text(str(mib << 20))
    except OSError as error:
        raise CannotInject(f"a cgroup with a limit cannot be made: {error}") from error


def _group(mount: Path, order: str) -> Path:
    return mount / f"resilient-chaos-{order}"
