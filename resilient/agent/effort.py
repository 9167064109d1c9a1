"""Own time: how long a worker has computed for its steps, without what it waited for others.

Where its script tells how long its GPU has computed, it is that. Else it is how long its training thread has computed, or wanted to
while something else had its core, read from the kernel's account of the thread: that costs the worker nothing and needs no word of
its script. A thread that waits for others sleeps, and what it sleeps is not in it; one that waits for a GPU spins, and then all
ranks look alike.
"""

import os

from resilient.heartbeat.region import Activity


def own_s(activity: Activity, thread_s: float | None) -> float | None:
    """A worker's own time, and that which its samples took; None where neither its script nor the kernel tells.

    Args:
        thread_s: own time of its training thread.
    """
    computed_s = activity.device_s or thread_s
    return None if computed_s is None else computed_s + activity.data_s


class OwnTime:
    """The own time of the main thread of a process; it is None where the kernel keeps no such account, and once it is gone."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd: int | None = os.open(f"/proc/{pid}/task/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = None

    def seconds(self) -> float | None:
        """Since the thread began: on a core, and ready to run without one."""
        if self._fd is None:
            return None
        try:
            running_ns, ready_ns = os.pread(self._fd, 64, 0).split()[:2]
        except (OSError, ValueError):
            return None
        return (int(running_ns) + int(ready_ns)) / 1e9

    def close(self) -> None:
        """Once."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
