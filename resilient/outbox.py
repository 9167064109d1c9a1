"""Effects: what the control core wants done, as plain data; and the outbox that its handlers append them to.

The driver carries effects out in the order in which they were appended. Those whose outcome matters come back as news: `RaiseFence`
as `fence_raised`, `Quarantine` as `quarantined`, `InquireAbout` as `inquired`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpoint.protocol import DriverRequest
from resilient.exits import Exit
from resilient.protocol.messages import DriverMessage
from resilient.recovery.rollback import InvalidationRule


@dataclass(frozen=True)
class Launch:
    """Start the agent of a node; one that is still there is ended first."""

    node: int


@dataclass(frozen=True)
class Send:
    """Send a message to a node's agent."""

    node: int
    message: DriverMessage


@dataclass(frozen=True)
class RequestDaemon:
    """Send a request to a node's snapshot daemon. The driver sends all requests of one turn to a node in one message."""

    node: int
    request: DriverRequest


@dataclass(frozen=True)
class RaiseFence:
    """From now on, the durable tier refuses checkpoints of generations before this one. Comes back as `fence_raised`.

    Attributes:
        patience_s: for a commit that is under way, or a file system that does not answer.
    """

    generation: int
    patience_s: float


@dataclass(frozen=True)
class Quarantine:
    """Rename the durable checkpoints that are invalidated, so that nobody goes on from them. Comes back as `quarantined`."""

    invalidated: tuple[InvalidationRule, ...]
    generation: int


@dataclass(frozen=True)
class InquireAbout:
    """Find out about nodes that are silent or gone. Comes back as `inquired`.

    Attributes:
        daemons: where their snapshot daemons listen, host:port; None where that is not known.
    """

    nodes: tuple[int, ...]
    daemons: tuple[str | None, ...]


@dataclass(frozen=True)
class WriteEvent:
    """Append to the ledger; `t` None for now, `host` None for the driver's."""

    event: str
    fields: Mapping[str, object]
    generation: int
    t: float | None = None
    host: str | None = None


@dataclass(frozen=True)
class WriteMetrics:
    """Append to the metrics."""

    fields: Mapping[str, object]
    generation: int
    t: float


@dataclass(frozen=True)
class AcknowledgeRecords:
    """Tell a node's agent that so many of its records are kept, once all that was appended before this is durable."""

    node: int
    count: int


@dataclass(frozen=True)
class WriteText:
    """Leave evidence for people in a file of the run directory."""

    path: str
    text: str


@dataclass(frozen=True)
class Finish:
    """End the run with this exit code; `message` is for the person, empty where there is nothing to explain."""

    code: Exit
    message: str


Effect = (
    Launch
    | Send
    | RequestDaemon
    | RaiseFence
    | Quarantine
    | InquireAbout
    | WriteEvent
    | WriteMetrics
    | AcknowledgeRecords
    | WriteText
    | Finish
)


@dataclass
class Outbox:
    """Effects in the order in which they are to be carried out. Invariant: only appended to, until the driver takes all."""

    effects: list[Effect] = field(default_factory=list)

    def append(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, node: int, message: DriverMessage) -> None:
        self.effects.append(Send(node, message))

    def request(self, node: int, request: DriverRequest) -> None:
        self.effects.append(RequestDaemon(node, request))

    def event(
        self, event: str, fields: Mapping[str, object], generation: int, t: float | None = None, host: str | None = None
    ) -> None:
        self.effects.append(WriteEvent(event, fields, generation, t, host))

    def take(self) -> list[Effect]:
        """All effects so far; the outbox is empty afterwards."""
        taken, self.effects = self.effects, []
        return taken
