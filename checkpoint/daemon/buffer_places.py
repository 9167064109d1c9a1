"""Where a node's buffers may lie: the places of the tiers, the fastest first, and those that were left for a slower one."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from checkpoint import safe_dir
from checkpoint.asking import answers
from checkpoint.daemon.buffers import Buffers
from checkpoint.daemon.mounts import ANSWER_S, Mounts
from checkpoint.protocol import DaemonSettings
from checkpoint.tiers.lease import buffer_path

log = logging.getLogger(__name__)


class _Seen(NamedTuple):
    """What a look at a place has found.

    Attributes:
        had_buffers: an earlier daemon had them there, and nobody else could have changed them.
        private: it is a directory of this user alone.
    """

    had_buffers: bool
    private: bool


class BufferPlaces:
    """The places of one node. Buffers lie in one of them at a time.

    Args:
        mounts: of the places; where one is gone, no buffers are made.
    """

    def __init__(self, settings: DaemonSettings, mounts: Mounts) -> None:
        self.all = [Path(place) for place in settings.places]
        self._own = Path(settings.directory) / "own"
        self._durable = [Path(tier.path) for tier in settings.tiers if tier.durable]
        self._count = settings.buffers
        self._mounts = mounts
        self._left: Sequence[Path] = ()

    def open(self) -> Buffers:
        """The buffers of this daemon's start: in the place where an earlier daemon had them, else in the first that works.

        The nearest place, which is memory, is asked first, and the others only where it has none; one that does not answer counts
        as not there.
        """
        seen = self._seen(self.all[:1])
        if not any(each.had_buffers for each in seen.values()):
            seen |= self._seen(self.all[1:])
        chosen = next((place for place, each in seen.items() if each.had_buffers), None)
        opened = self._first([chosen] if chosen else list(seen))
        nearer = self.all[: self.all.index(opened.root)] if opened.root in self.all else []
        self._left = [place for place in nearer if place in seen and seen[place].private]  # shards of buffers may lie there
        return opened

    def _seen(self, places: Sequence[Path]) -> dict[Path, "_Seen"]:
        """What is there, of the places that answer."""
        answered = answers(self._look, places, ANSWER_S)
        for place in places:
            if place not in answered:
                log.warning("%s counts as no place of buffers: it does not answer within %g s", place, ANSWER_S)
        return {place: each for place in places if isinstance(each := answered.get(place), _Seen)}

    def _look(self, place: Path) -> "_Seen":
        there = any(_is_there(buffer_path(place, index)) for index in range(self._count))
        return _Seen(there and safe_dir.is_safe(place, trusted=self.trusted(place)), safe_dir.is_private(place))

    def _first(self, places: Sequence[Path]) -> Buffers:
        for place in places:
            try:
                self._mounts.check(place)
                return self.buffers(place)
            except OSError as error:
                log.warning("no buffers in %s: %s", place, error.strerror or error)
        return Buffers(self._own, self._count)

    def trusted(self, place: Path) -> Path | None:
        """The durable tier that a place is on, which the user has chosen; None where it is in RAM or on a disk of this node."""
        return next((durable for durable in self._durable if place.is_relative_to(durable)), None)

    def buffers(self, place: Path) -> Buffers:
        """Those of a place. Raises OSError: it cannot be used."""
        return Buffers(place, self._count, trusted=self.trusted(place))

    def make(self, place: Path) -> None:
        """Make its directory. Raises OSError."""
        self._mounts.check(place)
        safe_dir.make_private(place, trusted=self.trusted(place))

    def slower(self, root: Path) -> list[Path]:
        """Those behind this one; none behind one that is not of the tiers."""
        return self.all[self.all.index(root) + 1 :] if root in self.all else []

    def leave(self, root: Path) -> None:
        """Buffers lie in another place from now on; shards of theirs may stay behind here."""
        self._left = list(dict.fromkeys((*self._left, root)))

    def left(self, root: Path) -> list[Path]:
        """Places that were left. Args: root: where the buffers are now."""
        return [place for place in self._left if place != root]

    async def clear(self, root: Path) -> None:
        """Remove what was left behind. Args: root: where the buffers are now."""
        for place in self.left(root):
            await asyncio.to_thread(safe_dir.remove, place, trusted=self.trusted(place))


def _is_there(buffer: Path) -> bool:
    """Whether an earlier daemon had a buffer there; none is on a file system that answers with an error."""
    try:
        return buffer.is_dir()
    except OSError as error:
        log.warning("%s counts as no buffer: %s", buffer, error.strerror)
        return False
