"""Own time: how long the training thread of a worker has computed, or wanted to while something else had its core.

Read from the kernel's account of the thread, so that it costs the worker nothing and needs no word of its script. A thread that
waits for others sleeps, and what it sleeps is not in it. (On a GPU the thread spins while it waits, and all ranks look alike.)
"""

import os


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
