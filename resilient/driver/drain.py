"""A drain: how all ranks come to stop at one and the same step boundary without talking to each other.

Two rounds. First every agent *proposes* to its workers to hold at the next boundary that they reach, and tells the furthest
boundary that any of them had passed by then. The first boundary beyond all of those is one that no rank has passed, and that
every rank will see: the second round *arms* it. A rank holds for one round trip; no rank stops where another has gone on.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from resilient.driver.effects import Effect, Send
from resilient.page import NOT_BEATEN


@dataclass
class Drain:
    """One drain; times in unix seconds."""

    signal: str
    asked_t: float
    deadline_t: float
    nodes: Collection[int]
    armed: bool = False
    _checked: dict[int, int] = field(default_factory=dict)

    @property
    def budget_s(self) -> float:
        """How long it may take in all."""
        return self.deadline_t - self.asked_t

    def propose(self, node: int) -> Effect:
        """The first round's message to a node."""
        return Send(node, {"type": "propose", "target": NOT_BEATEN, "reason": self.signal})

    def proposed(self, node: int, checked: int) -> list[Effect]:
        """A node's answer; the second round's messages once all have answered."""
        self._checked[node] = checked
        if self.armed or not self._checked.keys() >= set(self.nodes):
            return []
        self.armed = True  # once and for all: a later target would part the ranks
        target = max(self._checked.values()) + 1
        return [Send(index, {"type": "arm", "target": target}) for index in self.nodes]


def fits(remaining_s: float, *, step_s: float, stall_s: float, size_bytes: int, rate_bytes_per_s: float) -> bool:
    """Whether there is time to finish a step, take a snapshot of it, and make that durable.

    Args:
        step_s: a whole step may still have to be computed.
        stall_s: for copying the state.
        rate_bytes_per_s: of the durable tier, as it was measured last. It may be half as fast this time.
    """
    return step_s + stall_s + 2 * size_bytes / rate_bytes_per_s <= remaining_s
