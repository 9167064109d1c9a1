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

    Invariant: one store of eight aligned bytes is atomic, and the daemon alone writes; so a reader sees a lease as a whole. The
    words behind it are the ranks' own, see `NodeAgreement`.

    Attributes:
        identity: device and number of the file.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, mmap.PAGESIZE)
            self._map = mmap.mmap(fd, mmap.PAGESIZE)
            found = os.fstat(fd)
        finally:
            os.close(fd)
        self.identity = found.st_dev, found.st_ino
        self.words = memoryview(self._map).cast("Q")

    def publish(self, lease: Lease) -> None:
        """Raises ValueError where a number is too large for its bits."""
        if lease.generation >> 24 or lease.number >> 32:
            raise ValueError(f"{lease} does not fit into a lease word")
        self.words[0] = lease.generation << 40 | lease.number << 8 | (0 if lease.buffer is None else lease.buffer + 1)

    def read(self) -> Lease:
        """The present lease."""
        word = self.words[0]
        return Lease(word >> 40, word >> 8 & 0xFFFFFFFF, (word & 0xFF) - 1 if word & 0xFF else None)


def attempt_of(step: int, again: int) -> int:
    """Number of an attempt to take a step, in 32 bits. Attempts are only compared for equality, and few at a time."""
    return (step << 6 | min(again, 0x3F)) & 0xFFFFFFFF


class NodeAgreement:
    """What the ranks of a node agree upon without the daemon: all of them take a snapshot, or none does.

    One rank may find no buffer for a snapshot, and another one a moment later. If the first left it out and the other took it, each
    would use the next lease for another snapshot than the other does, from then on, and none would be whole. So a rank that leaves
    one out writes that down, and one that uses a lease writes down what for.

    The ranks write two words of the control page without a lock. Where two write at once, one word is lost: they do different
    things for that snapshot, which the daemon drops, and agree about the next one.

    Args:
        generation: of the ranks.
    """

    def __init__(self, page: LeaseWord, generation: int) -> None:
        self._words, self._generation = page.words, generation

    def used_for(self, lease: int) -> int | None:
        """The attempt that a rank of this node uses a lease for; None where none does, as far as is known."""
        word = self._words[1]
        return word & 0xFFFFFFFF if word >> 32 == lease else None

    def use(self, lease: int, attempt: int) -> None:
        """This rank uses a lease for an attempt."""
        self._words[1] = lease << 32 | attempt

    def is_left_out(self, attempt: int) -> bool:
        """Whether a rank of this node has left an attempt out."""
        return bool(self._words[2] == self._left_out(attempt))

    def leave_out(self, attempt: int) -> None:
        """This rank leaves an attempt out, and the others need not copy anything for it."""
        self._words[2] = self._left_out(attempt)

    def _left_out(self, attempt: int) -> int:
        return self._generation << 40 | attempt


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
