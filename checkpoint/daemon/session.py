"""The session: the workers of this node in one generation, and what they have reported."""

from dataclasses import dataclass, field

from checkpoint.tiers.blueprint import Blueprint
from checkpoint.worker_news import StateCopied


@dataclass(eq=False)
class Session:
    """The workers of this node in one generation.

    Attributes:
        shard: number of this node's shard of their snapshots, whoever holds it; that of the node, unless the workers announce that
            several nodes hold the same.
        shards: of each snapshot.
        layouts: digest of the arrays that each rank has announced.
        copied: what ranks have reported of a step that others have not copied yet, by step and rank.
        skipped: steps of which there will be no shard.
        again: how often a step was taken again after it was left out; see `checkpoint.Snapshots.left_out`.
        done: ranks that are done with the present lease, by a snapshot or without.
        digest: of the arrays, once all ranks have announced the same: buffers are made for it.
        ready: buffers for the layout are there.
        plan: that was read last: what buffers are made for.

    Invariants: `done` and the keys in `copied` are among `ranks`; a skipped step is not in `copied`.
    """

    generation: int
    shard: int
    shards: int
    ranks: frozenset[int]
    layouts: dict[int, str] = field(default_factory=dict)
    copied: dict[int, dict[int, StateCopied]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    again: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    digest: str = ""
    ready: bool = False
    plan: Blueprint | None = None

    def counts(self, step: int, again: int) -> bool:
        """A rank takes a step that often `again`, or would have: whether that counts, and not another one's later try.

        What was reported of the step before does not count any more.
        """
        known = self.again.get(step, 0)
        if again > known:
            self.again[step] = again
            self.skipped.discard(step)
        return again >= known
