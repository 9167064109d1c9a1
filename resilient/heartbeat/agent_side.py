"""The agent's side of a heartbeat region: makes the memory, reads what the worker does and reports, and asks it to stop."""

import mmap
import os
from pathlib import Path

from checkpoint.errors import naming
from resilient.heartbeat import layout
from resilient.heartbeat.layout import NO_TARGET, NOT_BEATEN, NOT_CHECKED
from resilient.heartbeat.region import Mapped, Record, fence

_SHARE = 64  # a ring takes at most such a part of the room that there is, as in a container's /dev/shm of 64 MiB


def ring_bytes(free_bytes: int) -> int:
    """Of a region that is made where so much is free. Pure."""
    return max(layout.LEAST_RING_BYTES, min(layout.RING_BYTES, free_bytes // _SHARE // mmap.PAGESIZE * mmap.PAGESIZE))


class AgentRegion(Mapped):
    """The agent's side: makes the memory, reads the activity and the records, writes the stop target.

    Raises OSError where there is no room for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstatvfs(fd)
            with naming(path):
                os.posix_fallocate(fd, 0, layout.HEADER_BYTES + ring_bytes(found.f_bavail * found.f_frsize))
            super().__init__(fd)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self._read_to = 0
        self._closed = False
        self._words[layout.MAGIC_WORD] = layout.MAGIC
        self._words[layout.STEP] = self._words[layout.FIRST] = self._words[layout.REPORTED] = NOT_BEATEN
        self._words[layout.CHECKED] = NOT_CHECKED
        self._words[layout.TARGET] = NO_TARGET

    def propose(self, target: int, reason: str) -> int:
        """Ask the worker to hold at the first boundary at or beyond `target`; returns the last boundary it has checked."""
        text = reason.encode()[: layout.REASON_BYTES - 1]
        self._map[layout.REASON_AT : layout.REASON_AT + layout.REASON_BYTES] = text.ljust(layout.REASON_BYTES, b"\0")
        self._words[layout.TARGET] = target
        fence()
        return self._words[layout.CHECKED]

    def arm(self, target: int) -> None:
        """Turn the proposal into an order: stop at the first boundary at or beyond `target`."""
        self._words[layout.TARGET] = target
        fence()
        self._words[layout.ARMED] = 1

    def drain(self) -> list[Record]:
        """The records that are complete and were not read before, oldest first. Their room is given free by `keep`."""
        records = self._records(self._read_to)
        if records:
            self._read_to = records[-1].end
        return records

    def keep(self, end: int) -> None:
        """The records up to this place are in the ledger: nobody needs to find them here any more."""
        if not self._closed:
            self._words[layout.TAIL] = max(end, self._words[layout.TAIL])

    def close(self, *, keep_file: bool = False) -> None:
        """Give the memory back; the file is left for `salvage` where that is wanted."""
        self._closed = True
        super().close()
        if not keep_file:
            self.path.unlink(missing_ok=True)
