"""A drain: how all ranks come to stop at one and the same step boundary without talking to each other.

Two rounds. First every agent is *proposed* to have its workers hold at the next boundary that they reach, and tells the furthest
boundary that any of them had passed by then. The first boundary beyond all of those is one that no rank has passed, and that
every rank will see: the second round *arms* it. A rank holds for one round trip; no rank stops where another has gone on.
"""

from collections.abc import Collection

from resilient.exits import Exit
from resilient.outbox import Outbox
from resilient.protocol.messages import Arm, Propose

NO_BOUNDARY = -2  # as agents tell it of ranks that have not reached any


class Drain:
    """One drain; times in unix seconds.

    Args:
        nodes: those of the generation that is to stop.
        code: with which the job ends when it is done; `why` is put before what there is to say of its end, else empty.

    Invariant: it is armed at most once: a later target would part the ranks.
    """

    def __init__(
        self, signal: str, asked_t: float, deadline_t: float, nodes: Collection[int], code: Exit = Exit.STOPPED, why: str = ""
    ) -> None:
        self.signal, self.asked_t, self.deadline_t, self.code, self.why = signal, asked_t, deadline_t, code, why
        self._nodes = tuple(nodes)
        self._waiting = set(nodes)
        self._checked = NO_BOUNDARY
        self._armed = False

    @property
    def budget_s(self) -> float:
        """How long it may take in all."""
        return self.deadline_t - self.asked_t

    def explained(self, message: str) -> str:
        """What a person should know of the end."""
        return f"{self.why}; {message}" if self.why else message

    def hurry(self, until_t: float) -> None:
        """It must be over by then."""
        self.deadline_t = min(self.deadline_t, until_t)

    def propose(self, node: int, generation: int, out: Outbox) -> None:
        """Send the first round's message to a node."""
        out.send(node, Propose(generation=generation, reason=self.signal))

    def proposed(self, node: int, checked: int, generation: int, out: Outbox) -> None:
        """A node has answered; send the second round's messages once all have."""
        if self._armed:
            return
        self._waiting.discard(node)
        self._checked = max(self._checked, checked)
        if not self._waiting:
            self._armed = True
            for each in self._nodes:
                out.send(each, Arm(generation=generation, target=self._checked + 1))


def fits(remaining_s: float, *, step_s: float, stall_s: float, size_bytes: int, rate_bytes_per_s: float) -> bool:
    """Whether there is time to finish a step, take a snapshot of it, and make that durable.

    Args:
        step_s: a whole step may still have to be computed.
        stall_s: for copying the state.
        rate_bytes_per_s: of the durable tier, as it was measured last. It may be half as fast this time.
    """
    return step_s + stall_s + 2 * size_bytes / rate_bytes_per_s <= remaining_s
