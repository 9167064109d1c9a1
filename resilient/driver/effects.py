"""What the coordinator wants done. Plain data; the driver carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass

from resilient.exits import Exit
from resilient.rollback import Void


@dataclass(frozen=True)
class Launch:
    """Start the agent of a node; one that is still there is ended first."""

    node: int


@dataclass(frozen=True)
class Send:
    """Send a control message to a node's agent."""

    node: int
    message: Mapping[str, object]


@dataclass(frozen=True)
class RaiseFence:
    """From now on, checkpoints of generations before this one are refused."""

    generation: int


@dataclass(frozen=True)
class SetAside:
    """Durable checkpoints that are void get a name under which nobody goes on from them, on behalf of a generation."""

    voids: tuple[Void, ...]
    generation: int


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
class WriteText:
    """Leave evidence for people in a file of the run directory."""

    path: str
    text: str


@dataclass(frozen=True)
class Finish:
    """End the run with this exit code; `message` is for the person, empty where there is nothing to explain."""

    code: Exit
    message: str


Effect = Launch | Send | RaiseFence | SetAside | WriteEvent | WriteMetrics | WriteText | Finish
