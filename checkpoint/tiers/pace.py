"""Pace: a cap on the bytes per second that a tier may take, shared by the threads that write to it.

Owns the waiting, and the measurement of what a tier gives.
"""

import threading
import time


class Pace:
    """Args: rate_bytes_per_s: the cap; None for none."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        self._rate = rate_bytes_per_s
        self._free_t = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def wait(self, size_bytes: int, cancelled: threading.Event) -> None:
        """Wait until so many bytes may go; shorter when cancelled."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_t)
            self._free_t = start + size_bytes / self._rate
        cancelled.wait(max(0.0, start - now))
