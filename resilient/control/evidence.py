"""Evidence: what proves that a node is gone, beside its silence.

From the network alone, a host that has crashed looks like one whose link is down for a while, and that one is worth waiting for. So
whoever can know is asked: the scheduler, which has called a node down, and the node itself, which refuses a connection to its
snapshot daemon when it lives and the daemon does not, as after a reboot. Silence alone ends the waiting only after
`resilience.lost_s`.

Owns when to ask, and about whom; the driver asks (`InquireAbout`), and what it was told comes back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from resilient.outbox import InquireAbout, Outbox

SILENT_S = 3.0  # two reports of an agent have not come
REFUSED_S = 5.0  # a daemon that has died is followed by another one sooner, unless its agent has died too
AGAIN_S = 0.5  # between an answer and the next question, at first
EAGER_S = 20.0  # so long; a node may be waited for all day
LATER_S = 5.0  # between them after that
ANSWER_S = 15.0  # an answer that has not come by then never does
AT_ONCE = 64  # nodes of one question

DOWN = frozenset({"DOWN", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})
"""States of Slurm in which nothing runs on a node any more. NOT_RESPONDING is none: a link may be down."""

DEPARTED = "Slurm has taken it out of the job"

Door = Literal["open", "refused", "unreachable", "unknown"]


@dataclass(frozen=True)
class Evidence:
    """What was found out about a node.

    Attributes:
        states: the scheduler's words for it, as DOWN, DRAIN, NOT_RESPONDING; empty where it has not said.
        door: what became of a connection to its snapshot daemon.
        departed: the scheduler has taken it out of the job.
    """

    node: int
    states: frozenset[str] = frozenset()
    door: Door = "unknown"
    departed: bool = False


def proof(evidence: Evidence, silent_s: float) -> str | None:
    """Why a node is gone that has not been heard of for so long; None if it may only be cut off for a while."""
    if silent_s < SILENT_S:
        return None
    if down := sorted(evidence.states & DOWN):
        return f"Slurm calls it {down[0]}"
    if evidence.door == "refused" and silent_s >= REFUSED_S:
        return "its host lives, and refuses a connection to its snapshot daemon"
    return None


class Inquiries:
    """Invariant: at most one question is open. All times are attended seconds."""

    def __init__(self) -> None:
        self._not_before_s = self._since_s = 0.0
        self._known: frozenset[int] = frozenset()  # that were asked about last

    def due(self, now_s: float) -> bool:
        """Whether it is time to ask, if there is anybody to ask about."""
        return now_s >= self._not_before_s

    def ask(self, nodes: Sequence[int], addresses: Mapping[int, str], now_s: float, out: Outbox) -> None:
        """Ask about these nodes. Args: addresses: of their snapshot daemons, of those that are known."""
        asked = tuple(nodes[:AT_ONCE])
        if not self._known.issuperset(asked):
            self._since_s = now_s
        self._known = frozenset(asked)
        if asked:
            self._not_before_s = now_s + ANSWER_S
            out.append(InquireAbout(asked, tuple(addresses.get(node) for node in asked)))

    def answered(self, now_s: float) -> None:
        """The question is answered."""
        self._not_before_s = now_s + (AGAIN_S if now_s < self._since_s + EAGER_S else LATER_S)
