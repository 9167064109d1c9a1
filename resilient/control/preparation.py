"""Which node's agent runs the preparation of the entry point, until one has come to its end. Pure."""

from collections.abc import Iterable

TRIES = 3  # of one whose process is killed each time


class Preparation:
    """Invariant: at most one node is at it, as far as the driver knows; a node that is lost is followed by another."""

    def __init__(self) -> None:
        self.done = False
        self._node: int | None = None
        self._killed = 0

    def launched(self, node: int) -> bool:
        """An agent is started: whether it prepares as soon as it can."""
        if self.done or self._node not in (None, node):
            return False
        self._node = node
        return True

    def connected(self, node: int) -> bool:
        """An agent is there that was not started for it: whether it is to prepare."""
        if self.done or self._node is not None:
            return False
        self._node = node
        return True

    def lost(self, node: int, others: Iterable[int]) -> int | None:
        """A node's agent has gone: the one of the others that is to prepare instead, if one is needed and there is one."""
        if self.done or self._node != node:
            return None
        self._node = min(others, default=None)
        return self._node

    def killed(self) -> bool:
        """Its process was killed on its node, which is there: whether that node is to try again."""
        self._killed += 1
        return self._killed < TRIES
