"""What a generation may go on from: steps that are whole, and where the copies of their node shards lie.

Never imports torch, because the snapshot daemon does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Holding:
    """A copy of a node shard: `directory` on this node, or to be asked for at `address` (host:port), with a worker's key."""

    directory: Path | None = None
    address: str | None = None
    remote_path: str = ""
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Candidate:
    """A step that may be gone on from.

    Attributes:
        step: that it is of.
        tier: where it lies.
        path: of a committed checkpoint; None where nodes hold shards of it.
        holdings: copies of the shards, in the order in which they are opened while something is wanted: first those of this node.
        generation: that took it: another one's of the same step may lie where a copy is said to be. None: whichever is there.
    """

    step: int
    tier: str
    path: Path | None = None
    holdings: Sequence[Holding] = ()
    generation: int | None = None
