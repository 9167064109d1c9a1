"""The messages between the snapshot daemon of a node (`checkpoint.daemon`) and its agent, and who sends which when.

    driver ─(through the node's agent)─► daemon    DriverRequest
    agent ──────────────────────────────► daemon    AgentRequest: DaemonSettings first
    daemon ─────────────────────────────► agent     DaemonNews, which the agent passes on to the driver

What workers report to the daemon is in `checkpoint.worker_news`, what daemons and workers read from each other's nodes in
`checkpoint.shard_reads`.

`generation` is the one on whose behalf the sender speaks. Sizes are in bytes, durations in seconds.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from checkpoint.framing import Message, Plain

JobKind = Literal["copy", "replicate", "flush", "commit"]


class SnapshotKey(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A snapshot: its step, and the generation that took it. Travels as a pair."""

    step: int
    generation: int


class NodeShard(Plain, kw_only=True, frozen=True):
    """What one node holds of a snapshot on one of its tiers.

    Attributes:
        directory: on that node.
        shard: number of this shard: the node rank, in the generation that took the snapshot, of the node that wrote it; where
            several nodes write the same, they have one number.
        shards: of the snapshot.
        replica: held for another node.
    """

    tier: str
    directory: str
    key: SnapshotKey
    shard: int
    shards: int
    size_bytes: int
    replica: bool = False


# -- driver to daemon -----------------------------------------------------------------------------------------------------


class Retain(Message, frozen=True):
    """Of a tier these steps are needed and no others as far as `upto`; beyond it, all that this generation or a later one took
    except `left_out`. Sent whenever that changes.

    Attributes:
        again: of each step in `left_out`, how often it had been taken again by then; none: never. What is taken again later counts.
    """

    generation: int
    tier: str
    steps: tuple[int, ...]
    upto: int
    left_out: tuple[int, ...] = ()
    again: tuple[int, ...] = ()


class Discard(Message, frozen=True):
    """What `invalid_generation` and earlier ones computed beyond `step` is invalid. Sent after a roll-back, before a start."""

    generation: int
    step: int
    invalid_generation: int


class StartJob(Message, frozen=True):
    """Copy the shard to a tier of the node, flush it to the durable tier, or commit the step there once all nodes have flushed."""

    generation: int
    kind: Literal["copy", "flush", "commit"]
    job_id: int
    tier: str
    key: SnapshotKey
    shard: int


class Replicate(Message, frozen=True):
    """Fetch a shard from the daemon at `address` (host:port), whose buddy this node is."""

    generation: int
    job_id: int
    tier: str
    key: SnapshotKey
    shard: int
    address: str
    directory: str


class Cancel(Message, frozen=True):
    """A job is not wanted any more, whether it runs or waits."""

    generation: int
    job_id: int


class Sync(Message, frozen=True):
    """Answer `Synced` once all that workers have reported by now is dealt with. Sent at the end of a job."""

    generation: int


DriverRequest = Retain | Discard | StartJob | Replicate | Cancel | Sync


# -- agent to daemon ------------------------------------------------------------------------------------------------------


class TierSettings(Plain, kw_only=True, frozen=True):
    """A tier that the daemon writes to.

    Attributes:
        path: of a node's tier: where its shards are; of the durable one: of committed checkpoints.
        mark: name of a file that is in the durable tier's root as long as that is mounted, and what it holds.
    """

    name: str
    durable: bool
    path: str
    keep_last: int
    keep_every: int | None = None
    max_bytes_per_s: float | None = None
    mark: tuple[str, str] | None = None


class DaemonSettings(Message, frozen=True):
    """The first message to a daemon.

    Attributes:
        host: address at which other nodes read from this one.
        keys: by role; see `checkpoint.handshake.daemon_keys`.
        directory: in RAM, short: for its socket and control word.
        memory: name of the tier of buffers.
        places: directories for the buffers, best first.
        buffers: how many.
    """

    generation: int
    node: int
    host: str
    keys: Mapping[str, str]
    directory: str
    memory: str
    places: tuple[str, ...]
    buffers: int
    tiers: tuple[TierSettings, ...]
    nice: int = 5


class BeginSession(Message, frozen=True):
    """A generation begins, in which this node is the `node_rank`-th of `nodes`.

    Attributes:
        renew: a process of the generation before may still write into the present buffers: use others.
    """

    generation: int
    node_rank: int
    nodes: int
    first_rank: int
    ranks: int
    renew: bool = False


class TakeInventory(Message, frozen=True):
    """Answer `Inventory`."""

    generation: int


class Clear(Message, frozen=True):
    """Delete all that is held on these tiers; answer `Cleared`. The end of a campaign."""

    generation: int
    tiers: tuple[str, ...]


AgentRequest = DaemonSettings | BeginSession | TakeInventory | Clear
DaemonRequest = DriverRequest | AgentRequest


# -- daemon to agent and driver -------------------------------------------------------------------------------------------


class Listening(Message, frozen=True):
    """A daemon has started; other nodes' daemons read from it at `address` (host:port)."""

    generation: int
    address: str


class Inventory(Message, frozen=True):
    """All that the node holds."""

    generation: int
    address: str
    shards: tuple[NodeShard, ...]


class Held(Message, frozen=True):
    """A shard is on a tier.

    Attributes:
        job_id: the job that put it there; None where workers took it.
        stall_s: for which training stood still, on the slowest rank.
        wants: tiers that are to have the step.
        again: how often the step had been taken before, and left out by a rank; what was reported of it then does not count.
    """

    generation: int
    shard: NodeShard
    job_id: int | None = None
    stall_s: float = 0.0
    write_s: float = 0.0
    wants: tuple[str, ...] = ()
    again: int = 0


class Skipped(Message, frozen=True):
    """There will be no shard of this step.

    Attributes:
        again: how often it had been taken before, and left out by a rank.
        wants: tiers that were to have the step, as far as that is known.
    """

    generation: int
    step: int
    reason: str
    again: int = 0
    wants: tuple[str, ...] = ()


class Stale(Message, frozen=True):
    """A step has the same bytes as the step `before` although training went on; it is refused."""

    generation: int
    step: int
    before: int


class Flushed(Message, frozen=True):
    """A shard is on the durable tier; the step counts once it is committed."""

    generation: int
    job_id: int
    tier: str
    key: SnapshotKey
    shard: int
    size_bytes: int
    write_s: float


class Committed(Message, frozen=True):
    """A step is committed on the durable tier."""

    generation: int
    job_id: int
    tier: str
    key: SnapshotKey
    shard: int
    size_bytes: int
    files: int
    write_s: float


class JobFailed(Message, frozen=True):
    """A job has ended without success.

    Attributes:
        cancelled: it was not wanted any more.
        unreachable: the daemon that has the shard did not answer.
        superseded: its buffer is leased for a newer snapshot, and no other tier has it: the node holds it no more.
    """

    generation: int
    kind: JobKind
    job_id: int
    tier: str
    key: SnapshotKey
    shard: int
    reason: str
    cancelled: bool = False
    unreachable: bool = False
    superseded: bool = False


class TierTrouble(Message, frozen=True):
    """A tier cannot be written; it is tried again."""

    generation: int
    tier: str
    detail: str
    errno: int | None = None


class TierWell(Message, frozen=True):
    """A tier can be written again."""

    generation: int
    tier: str
    down_s: float


class NoRoom(Message, frozen=True):
    """No place has room for the buffers."""

    generation: int
    size_bytes: int
    places: tuple[str, ...]


class Synced(Message, frozen=True):
    """Answers `Sync`."""

    generation: int


class Cleared(Message, frozen=True):
    """Answers `Clear`."""

    generation: int


DaemonNews = (
    Listening
    | Inventory
    | Held
    | Skipped
    | Stale
    | Flushed
    | Committed
    | JobFailed
    | TierTrouble
    | TierWell
    | NoRoom
    | Synced
    | Cleared
)
