"""The copies of a step's node shards: on this node, and on others, each opened only once something is wanted that no other has.

Owns which are open. Any node may hold a shard, and a rank mostly needs what its own node holds: were all opened, every rank would
connect to every node after each restart.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

from checkpoint import metadata, shard_manifest
from checkpoint.candidates import Candidate, Holding
from checkpoint.errors import DamagedCheckpoint, UnreachableCheckpoint
from checkpoint.metadata import Contents
from checkpoint.shard_manifest import ShardManifest
from checkpoint.source import DirectorySource, Source


class Copies:
    """Those that can be read, in the order of the candidate's holdings; to go on in it opens the next one. Threads may share it.

    Args:
        away: to it are added the copies that may be there, and do not answer.

    Attributes:
        contents: what the step holds, as the first of them says.

    Raises DamagedCheckpoint where there is none.
    """

    def __init__(self, choice: Candidate, away: list[UnreachableCheckpoint]) -> None:
        self._choice, self._away = choice, away
        self._left = iter(choice.holdings)
        self._opened: list[Source] = []
        self._opening = threading.Lock()
        self._lost = DamagedCheckpoint(Path(), f"nobody holds step {choice.step}")
        self._text: bytes | None = None  # of the metadata
        if not self._open_next() or self._text is None:
            raise self._lost
        try:
            self.contents: Contents = metadata.parse(self._opened[0].path, self._text)
        except DamagedCheckpoint:  # nobody gets it to close it
            self.close()
            raise

    def __iter__(self) -> Iterator[Source]:
        number = 0
        while number < len(self._opened) or self._reaches(number):
            yield self._opened[number]
            number += 1

    def close(self) -> None:
        for each in self._opened:
            each.close()

    def _reaches(self, number: int) -> bool:
        """Whether there is one of this number, which at first is not open."""
        with self._opening:
            return number < len(self._opened) or self._open_next()

    def _open_next(self) -> bool:
        for holding in self._left:
            try:
                source = self._open(holding)
            except DamagedCheckpoint as error:
                self._lost = error
                if isinstance(error, UnreachableCheckpoint):
                    self._away.append(error)
                continue
            if source is not None:
                self._opened.append(source)
                return True
        return False

    def _open(self, holding: Holding) -> Source | None:
        """One copy; None where another one is there by now. Raises DamagedCheckpoint."""
        if holding.directory is not None:
            held = shard_manifest.read(holding.directory)
            if not self._is_wanted(held):
                return None
            self._text = self._text or metadata.text(holding.directory, held.files.get(metadata.NAME))
            return DirectorySource(holding.directory, chunks=held.chunks)
        from checkpoint.tiers.remote import RemoteShard

        remote = RemoteShard(holding.address or "", holding.remote_path, holding.key)
        try:
            if self._is_wanted(remote.manifest):
                self._text = self._text or remote.document(metadata.NAME)
                return remote
        except BaseException:  # nobody gets it to close it
            remote.close()
            raise
        remote.close()
        return None

    def _is_wanted(self, held: ShardManifest) -> bool:
        return held.step == self._choice.step and self._choice.generation in (None, held.generation)
