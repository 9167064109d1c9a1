"""Presence: which nodes' agents have not been heard of for too long.

A node is checked only when its silence may have become too long, which a heap of the times at which nodes were last checked
tells: the work is that of the nodes that are due, however many there are.
"""

import heapq
from collections.abc import Callable


class Presence:
    """When each node was last heard of, in attended seconds.

    Invariant: every node that is watched has exactly one entry in the heap, at or before the time at which it was last heard of.
    """

    def __init__(self) -> None:
        self._last_message_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._queued: set[int] = set()

    def joined(self, node: int, now_s: float) -> None:
        """An agent has connected: it is watched from now on."""
        self._last_message_s[node] = now_s
        if node not in self._queued:
            self._queued.add(node)
            heapq.heappush(self._heap, (now_s, node))

    def on_message(self, node: int, now_s: float) -> None:
        """Any message of a node."""
        if node in self._last_message_s:
            self._last_message_s[node] = now_s

    def left(self, node: int) -> None:
        """An agent is gone: it is not watched any more."""
        self._last_message_s.pop(node, None)

    def silent_s(self, node: int, now_s: float) -> float:
        """For how long a node has said nothing; 0 for one that is not watched."""
        return max(0.0, now_s - self._last_message_s.get(node, now_s))

    def overdue(self, now_s: float, limit_s: Callable[[int], float], *, least_s: float) -> list[int]:
        """The nodes that have been silent for longer than their limit.

        Args:
            limit_s: of a node.
            least_s: no limit is shorter.
        """
        found, again = [], []
        while self._heap and now_s - self._heap[0][0] > least_s:
            _, node = heapq.heappop(self._heap)
            if node not in self._last_message_s:
                self._queued.discard(node)
                continue
            again.append((self._last_message_s[node], node))
            if self.silent_s(node, now_s) > least_s and self.silent_s(node, now_s) > limit_s(node):
                found.append(node)
        for entry in again:
            heapq.heappush(self._heap, entry)
        return found
