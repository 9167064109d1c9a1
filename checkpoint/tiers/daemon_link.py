"""A worker's reports to the snapshot daemon of its node (`checkpoint.worker_news`).

Owns the socket, and what has become of leases as long as the daemon has not taken it. Nothing that the daemon does or leaves out
raises here: without one a snapshot is lost, training is not.
"""

import socket
import time
from pathlib import Path

from checkpoint.framing import encode
from checkpoint.worker_news import WorkerNews

REPORT_S = 1.0  # for a daemon that takes no reports
_POLL_S = 0.001


class DaemonLink:
    """Of one rank. Args: path: of the daemon's socket."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._undelivered: list[WorkerNews] = []  # of leases, which the daemon waits for and has not taken
        self._reachable = True  # the daemon has taken the last report

    def report(self, news: WorkerNews, *, may_be_lost: bool = False) -> bool:
        """Whether the daemon has taken it. Args: may_be_lost: a daemon that hangs holds up training once for all of these."""
        return self._sent(news, REPORT_S if self._reachable or not may_be_lost else 0.0)

    def report_lease(self, news: WorkerNews) -> None:
        """Report what has become of a lease: the daemon leases nothing else before all ranks have."""
        if not self.report(news):
            self._undelivered.append(news)

    def redeliver(self, *, wait: bool = False) -> None:
        """What the daemon has not taken. One that has been started anew since then drops it."""
        while self._undelivered and self._sent(self._undelivered[0], REPORT_S if wait else 0.0):
            self._undelivered.pop(0)

    @property
    def has_all(self) -> bool:
        """Whether the daemon has taken all that was reported of leases."""
        return not self._undelivered

    def close(self) -> None:
        self._socket.close()

    def _sent(self, news: WorkerNews, patience_s: float) -> bool:
        line = encode(news)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._socket.sendto(line, socket.MSG_DONTWAIT, self._path)
                self._reachable = True
                return True
            except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                # Full for a moment, or the daemon is being started anew.
                if time.monotonic() >= deadline:
                    self._reachable = False
                    return False
                time.sleep(_POLL_S)
