"""The lease: which buffer the next snapshot of a node goes to, and what daemon and workers both know of a buffer's directory.

Owns the control page, which the snapshot daemon writes and the workers of its node read, and the names inside a buffer.
"""

import mmap
import os
from pathlib import Path
from typing import NamedTuple

LINK = "buffers"
"""Name of the link, beside the daemon's socket, to where the buffers are."""
PREFIX = "buffer-"
STATE = ".state.json"
"""What the first rank of a node leaves in a buffer: the small state, which sealing puts into the root's metadata."""
LAYOUT = ".blueprint"
"""Holds the digest of the blueprint that a buffer is laid out for."""


class Lease(NamedTuple):
    """Permission for the workers of a generation to write one snapshot into a buffer.

    Attributes:
        generation: whose workers may use it.
        number: grows with each lease.
        buffer: index of the buffer; None where there is none to be had.
    """

    generation: int
    number: int
    buffer: int | None


class LeaseWord:
    """The word in shared memory through which leases are published: 24 bits generation, 32 bits number, 8 bits buffer + 1.

    A worker uses each lease at most once, and leases of its own generation only: what was published for the workers before it
    may lead to a buffer of another layout.

    Invariant: one store of eight aligned bytes is atomic, and the daemon alone writes; so a reader sees a lease as a whole.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("Q")

    def publish(self, lease: Lease) -> None:
        """Raises ValueError where a number is too large for its bits."""
        if lease.generation >> 24 or lease.number >> 32:
            raise ValueError(f"{lease} does not fit into a lease word")
        self._words[0] = lease.generation << 40 | lease.number << 8 | (0 if lease.buffer is None else lease.buffer + 1)

    def read(self) -> Lease:
        """The present lease."""
        word = self._words[0]
        return Lease(word >> 40, word >> 8 & 0xFFFFFFFF, (word & 0xFF) - 1 if word & 0xFF else None)


def buffer_path(root: Path, index: int) -> Path:
    """The directory of a buffer."""
    return root / f"{PREFIX}{index}"


def index_of(path: Path) -> int:
    """The index of the buffer in a directory."""
    return int(path.name.removeprefix(PREFIX))


def layout_of(directory: Path) -> str:
    """Digest of the blueprint that a buffer is laid out for; empty where that is not known."""
    try:
        return (directory / LAYOUT).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""
