"""Files that stay open between two reads: few, however many are read from.

Owns their descriptors. A process may have 1,024 descriptors open by default, and a checkpoint can have more files than that.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

KEPT = 64


@dataclass
class _File:
    fd: int
    users: int = 0


class OpenFiles:
    """Descriptors by name; threads may share them.

    Args:
        kept: how many stay open that nobody uses, those that were used last.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._files: dict[str, _File] = {}  # in the order of their last use
        self._lock = threading.Lock()

    @contextmanager
    def use(self, name: str, opener: Callable[[], int]) -> Iterator[int]:
        """The descriptor of a file, which stays open meanwhile.

        Args:
            opener: opens it, where it is not open. What it raises is raised.
        """
        with self._lock:
            file = self._files.pop(name, None) or _File(opener())
            self._files[name] = file
            file.users += 1
        try:
            yield file.fd
        finally:
            with self._lock:
                file.users -= 1
                self._close(self._kept)

    def close(self) -> None:
        """Close what nobody uses, and the rest when it is not used any more: from now on nothing stays open."""
        with self._lock:
            self._kept = 0
            self._close(0)

    def _close(self, kept: int) -> None:
        """Close the files that were not used for longest, all but so many."""
        idle = [name for name, file in self._files.items() if not file.users]
        for name in idle[: max(0, len(idle) - kept)]:
            os.close(self._files.pop(name).fd)
