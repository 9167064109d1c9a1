"""A hold: how all ranks come to stop at one and the same step boundary without talking to each other.

Two rounds. First every agent is *proposed* to have its workers hold at the next boundary that they reach, and tells the furthest
boundary that any of them had passed by then. The first boundary beyond all of those is one that no rank has passed, and that
every rank will see: the second round *arms* it. A rank holds for one round trip; no rank stops where another has gone on.
"""

from collections.abc import Collection

from resilient.outbox import Outbox
from resilient.protocol.messages import Arm, Propose

NO_BOUNDARY = -2  # as agents tell it of ranks that have not reached any


class Hold:
    """One of a generation.

    Args:
        reason: what the ranks are told.
        nodes: those of the generation that is to stop.

    Invariant: it is armed at most once: a later target would part the ranks.
    """

    def __init__(self, reason: str, generation: int, nodes: Collection[int]) -> None:
        self.reason, self._generation = reason, generation
        self._nodes = tuple(nodes)
        self._waiting = set(nodes)
        self._checked = NO_BOUNDARY
        self._armed = False

    def propose(self, node: int, out: Outbox) -> None:
        """Send the first round's message to a node."""
        out.send(node, Propose(generation=self._generation, reason=self.reason))

    def proposed(self, node: int, checked: int, out: Outbox) -> None:
        """A node has answered; send the second round's messages once all have."""
        if self._armed:
            return
        self._waiting.discard(node)
        self._checked = max(self._checked, checked)
        if not self._waiting:
            self._armed = True
            for each in self._nodes:
                out.send(each, Arm(generation=self._generation, target=self._checked + 1))
