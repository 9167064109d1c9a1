"""All that the driver and the agents say to each other, and when. What concerns the snapshot daemon is in `checkpoint.protocol`.

    agent ─► driver     AgentMessage: Hello first; the node of all that follows is the connection's
    driver ─► agent     DriverMessage

`generation` is the one of which the sender speaks; 0 before the first. What speaks of a generation that is over is ignored, except
records and news of the snapshot daemon, which are true whenever they arrive. Times are unix seconds, durations seconds.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from checkpoint.framing import Message, Plain
from checkpoint.protocol import DaemonNews, DriverRequest, Inventory
from resilient.exits import Exit
from resilient.recovery.faults import WorkerEnd
from resilient.recovery.standing import Standing

# -- agent to driver ------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """An agent has connected, and has authenticated itself as this one (`resilient.protocol.connection.subject_of`).

    Attributes:
        incarnation: counts the agents that were started for this node.
        addr: at which other nodes reach this one.
        t: the node's clock.
        place: in the fabric, as `resilient.placement.fabric` reads it; empty where nothing tells.
    """

    generation: int
    node: int
    incarnation: int
    host: str
    addr: str
    t: float
    place: str = ""


class PreparationProgress(Message, frozen=True):
    """The entry point's preparation gets on: `done` of `total` of what it does now."""

    generation: int
    what: str
    done: int
    total: int


class PreparationEnded(Message, frozen=True):
    """The preparation is over; it has succeeded where there is neither a failure nor a problem.

    Attributes:
        problems: of the config: key, value, message.
        failure: any other reason.
        code: the exit code of the run for it.
        killed: the failure is that its process was killed, so that another one may succeed.
    """

    generation: int
    problems: tuple[tuple[str, Any, str], ...] = ()
    failure: str | None = None
    code: int = int(Exit.GAVE_UP)
    killed: bool = False


class Imported(Message, frozen=True):
    """The entry point is imported; processes can be forked."""

    generation: int


class HealthFinding(Plain, kw_only=True, frozen=True):
    """What one check of a node has found that is not good; see `resilient.health.report`.

    Attributes:
        device: that is not to be used any more as it is: that of this local rank.
    """

    check: str
    verdict: str
    text: str
    measured: Mapping[str, float | int | str] = {}
    device: int | None = None


class Health(Message, frozen=True):
    """A node was checked before it takes part."""

    generation: int
    took_s: float
    findings: tuple[HealthFinding, ...] = ()


class Ready(Message, frozen=True):
    """No worker is left on the node, and its store listens: the next generation may start. Sent before every generation."""

    generation: int
    store_port: int
    inventory: Inventory


class Started(Message, frozen=True):
    """The workers of the generation are forked. Attributes: pids: process id by rank."""

    generation: int
    pids: Mapping[int, int]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a rank that runs.

    Attributes:
        step: the last one that it finished; -1 before the first.
        phase: that it is in.
        beat_t: when it finished the step.
        activity_t: of its last activity; 0 if there was none.
        silent_s: since then.
        state: of its process, as /proc tells it, once a rank of the node has been silent for a while, or where one has shown no
            activity yet; else "".
        phased: whether it ever told a phase.
        own_s: spent without waiting for others since it began; None where that is not known.
        observed: its steps are counted from outside; its script does not beat.
        first_step: the first that it has finished, at first_beat_t; -1 where that is not known.
        inferred: the runtime has inferred the phase; else its script has told it.
    """

    step: int
    phase: str
    beat_t: float
    activity_t: float
    silent_s: float
    state: str
    phased: bool
    own_s: float | None = None
    observed: bool = False
    first_step: int = -1
    first_beat_t: float = 0.0
    inferred: bool = False


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What a worker reported: a ledger event, or with `event` None a line of metrics.

    Attributes:
        fields: complete on both ends.
        text: fields once more, as Python's JSON has them, where they hold what JSON proper has no word for: NaN and infinities.
    """

    rank: int
    t: float
    event: str | None
    fields: Mapping[str, Any]
    text: str = ""

    def __post_init__(self) -> None:
        if self.text:
            msgspec.structs.force_setattr(self, "fields", {**self.fields, **json.loads(self.text)})


class Report(Message, frozen=True):
    """All that is new on a node since the last one; records count before heartbeats, and both before news.

    Attributes:
        heartbeats: by rank.
        records: to be acknowledged by `RecordsWritten`.
        news: of the node's snapshot daemon.
    """

    generation: int
    heartbeats: Mapping[int, Heartbeat] = {}
    records: tuple[Record, ...] = ()
    news: tuple[DaemonNews, ...] = ()


class Proposed(Message, frozen=True):
    """Answers `Propose`. Attributes: checked: the furthest step boundary that any rank of the node has passed."""

    generation: int
    checked: int


class WorkerEnded(Message, frozen=True):
    """A worker has ended. Attributes: stopped: it had been asked to and did."""

    generation: int
    end: WorkerEnd
    stopped: bool


class SignalReceived(Message, frozen=True):
    """The agent got a signal. Attributes: name: as `SIGTERM`."""

    generation: int
    name: str


class LinkChange(Plain, kw_only=True, frozen=True):
    """What has happened to a link; see `resilient.agent.links.Change`."""

    interface: str | None
    state: str
    down_s: float | None = None
    detail: str = ""
    counters: Mapping[str, int] = {}


class LinksChanged(Message, frozen=True):
    """Links of the node have changed, at about `t`."""

    generation: int
    t: float
    changes: tuple[LinkChange, ...]


class Inspection(Plain, kw_only=True, frozen=True):
    """What a rank was doing; see `resilient.agent.inspect`.

    Attributes:
        state: of its process, as /proc tells it.
        cpu: share of a core.
        stacks: of its threads.
        standing: in which collective it waits.
    """

    state: str
    cpu: float
    stacks: str
    standing: Standing | None = None


class Inspected(Message, frozen=True):
    """Answers `Inspect`; by rank."""

    generation: int
    ranks: Mapping[int, Inspection]


class EndsFound(Message, frozen=True):
    """Answers `FindEnds`: every worker of the node that had failed by then has been told of, by `WorkerEnded`."""

    generation: int


class Alive(Message, frozen=True):
    """Answers `Ping` where there is nothing else to say."""

    generation: int


class AgentFailed(Message, frozen=True):
    """The agent ends by an error; it says nothing after that. In place of its hello: it cannot start.

    Attributes:
        error: its class and text, of one that nobody has foreseen; else what a person should know.
    """

    generation: int
    error: str


AgentMessage = (
    Hello
    | PreparationProgress
    | PreparationEnded
    | Imported
    | Health
    | Ready
    | Started
    | Report
    | Proposed
    | WorkerEnded
    | SignalReceived
    | LinksChanged
    | Inspected
    | EndsFound
    | Alive
)

# -- driver to agent ------------------------------------------------------------------------------------------------------


class Start(Message, frozen=True):
    """Start the workers of a generation.

    Attributes:
        node_rank, nodes: this node's place among those that take part.
        master_addr, master_port: of the store of node rank 0.
        collective_timeout_s: of process groups.
        report_s: between two reports while nothing but heartbeats is new.
        candidates: what workers may go on from, packed once for all nodes; see `protocol.candidates.pack`.
        mtbf_s: mean time between failures.
        durable_step: the newest that is known to be committed on the durable tier; 0: none.
        go_back_to: a roll-back: the step to go on from; None: the newest that is whole.
        skip: steps whose data is left out, as pairs of first and last.
        saved_step: after which the script wrote its newest checkpoint by itself; None: it has written none that counts.
        world_size: ranks of all nodes.
        first_rank: of this node.
        devices: on which its ranks compute, in their order, by the local rank that each has on a node without faults.
    """

    generation: int
    node_rank: int
    nodes: int
    master_addr: str
    master_port: int
    collective_timeout_s: float
    report_s: float
    mtbf_s: float
    candidates: bytes = b""
    durable_step: int = 0
    go_back_to: int | None = None
    skip: tuple[tuple[int, int], ...] = ()
    saved_step: int | None = None
    world_size: int = 1
    first_rank: int = 0
    devices: tuple[int, ...] = (0,)


class Stop(Message, frozen=True):
    """End the workers of the generation now.

    Attributes:
        incident: id of the fault of which hung workers are asked for their stacks and records before; None: they are not asked.
        writing_s: for how long those that write a checkpoint of their script's own may go on with that.
    """

    generation: int
    incident: str | None = None
    writing_s: float = 0.0


class Propose(Message, frozen=True):
    """First round of a drain: hold at the next step boundary, answer `Proposed`."""

    generation: int
    reason: str


class Arm(Message, frozen=True):
    """Second round of a drain: stop at this step boundary."""

    generation: int
    target: int


class Inspect(Message, frozen=True):
    """See what the ranks are doing, answer `Inspected`. Attributes: early: ranks, too, that have not shown any activity."""

    generation: int
    early: bool = False


class FindEnds(Message, frozen=True):
    """A worker has failed because of a peer: tell of those that have failed, or are about to be gone, answer `EndsFound`."""

    generation: int


class RecordsWritten(Message, frozen=True):
    """So many more of the records that the agent has sent are durable; their room in the regions may be used again."""

    generation: int
    count: int


class Ping(Message, frozen=True):
    """The driver lives. Answered by `Alive` where no reports are sent."""

    generation: int


class Prepare(Message, frozen=True):
    """Run the entry point's preparation: the node that was at it is lost, or its process was killed."""

    generation: int


class DaemonRequests(Message, frozen=True):
    """For the node's snapshot daemon, in this order."""

    generation: int
    requests: tuple[DriverRequest, ...]


class ReplaceDaemon(Message, frozen=True):
    """The node's snapshot daemon does not answer: end it, and start another."""

    generation: int


class Shutdown(Message, frozen=True):
    """The job is over. Attributes: clear: tiers of which everything is deleted."""

    generation: int
    clear: tuple[str, ...] = ()


DriverMessage = (
    Start | Stop | Propose | Arm | Inspect | FindEnds | RecordsWritten | Ping | Prepare | DaemonRequests | ReplaceDaemon | Shutdown
)
