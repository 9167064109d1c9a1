"""Where chunks can be read from: a committed checkpoint, a node's shard of one, another node.

Owns reading slots as they lie in a shard file. Whether they are sound is for `checkpoint.loading` to say.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from checkpoint import direct
from checkpoint.errors import DamagedCheckpoint, refuse_pipe, unreadable
from checkpoint.layout import ChunkRun, Shard
from checkpoint.manifest import FileEntry
from checkpoint.open_files import OpenFiles


class Source(ABC):
    """Somewhere that chunks of one step can be read from; may be used by several threads."""

    path: Path
    """What messages call it."""

    @abstractmethod
    def holds(self, shard: Shard, slot: int) -> bool:
        """Whether the chunk in a slot is to be had here."""

    def stretch(self, chunk_run: ChunkRun) -> int:
        """How many chunks of a run are to be had here, from its first one on without a gap."""
        for number in range(chunk_run.length):
            if not self.holds(chunk_run.shard, chunk_run.slot + number):
                return number
        return chunk_run.length

    @abstractmethod
    def read(self, shard: Shard, slot: int, target: memoryview) -> None:
        """Fill `target` (page-aligned) with the slots from this one on. Raises DamagedCheckpoint where that cannot be done."""

    trusted = False
    """Whether the bytes were compared with their checksums a moment ago, and lie in this machine's memory."""

    def view(self, shard: Shard, slot: int, count: int) -> memoryview:
        """So many slots from this one on, page-aligned. Raises DamagedCheckpoint."""
        target = direct.memory(count * shard.array.slot_bytes)
        self.read(shard, slot, target)
        return target

    def expected(self, shard: Shard, slot: int) -> int | None:
        """The crc32c of the chunk in a slot, where this source knows it from elsewhere than the slot itself."""
        return None

    def check(self) -> None:  # noqa: B027 - most sources never change
        """Raises DamagedCheckpoint where what was read may have changed meanwhile."""

    def close(self) -> None:  # noqa: B027 - not every source has something open
        """Give back what is open."""


class DirectorySource(Source):
    """Shard files in a directory: of a committed checkpoint, or a node shard.

    Args:
        path: the directory.
        files: entries of a manifest; sizes are compared with them.
        chunks: of a node shard: crc32c of each chunk that is here, by file and slot.
    """

    def __init__(
        self,
        path: Path,
        *,
        files: Mapping[str, FileEntry] | None = None,
        chunks: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        self.path = path
        self._files = files
        self._chunks = chunks
        self._open = OpenFiles()

    def holds(self, shard: Shard, slot: int) -> bool:
        return self._chunks is None or slot in self._chunks.get(shard.path, ())

    def expected(self, shard: Shard, slot: int) -> int | None:
        return None if self._chunks is None else self._chunks[shard.path].get(slot)

    def read(self, shard: Shard, slot: int, target: memoryview) -> None:
        offset = shard.array.offset(slot)
        with self._open.use(shard.path, lambda: self._checked(shard)) as fd:
            try:
                if slot == 0 and offset:  # with the index, which nobody needs, so that all of the file is checked by someone
                    head = direct.memory(offset)
                    done = direct.read(fd, [head, target], 0) - offset
                    if done >= 0 and bytes(head) != shard.head:
                        raise DamagedCheckpoint(self.path, f"{shard.path} has a wrong index")
                else:
                    done = direct.read(fd, [target], offset)
            except OSError as error:
                raise unreadable(self.path, shard.path, error) from error
        if done < len(target):
            raise DamagedCheckpoint(self.path, f"{shard.path} ends at byte {offset + done}")

    def _checked(self, shard: Shard) -> int:
        """The shard file, whose size is as it must be."""
        try:
            refuse_pipe(self.path / shard.path)
            fd = direct.open_to_read(self.path / shard.path)
        except OSError as error:
            raise unreadable(self.path, shard.path, error) from error
        size = os.fstat(fd).st_size
        entry = None if self._files is None else self._files.get(shard.path)
        if size != shard.size_bytes or (self._files is not None and (entry is None or entry.size_bytes != size)):
            os.close(fd)
            raise DamagedCheckpoint(self.path, f"{shard.path} has {size} bytes instead of {shard.size_bytes}")
        return fd

    def close(self) -> None:
        self._open.close()
