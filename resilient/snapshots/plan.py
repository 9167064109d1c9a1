"""The tiers of a campaign, as the snapshot core must know them."""

from dataclasses import dataclass

from resilient.recovery.rollback import InvalidationRule


@dataclass(frozen=True)
class TierPlan:
    """One tier.

    Attributes:
        keep_last: steps that are kept on a node's tier.
        replicas: whether a buddy keeps a copy of each node's shard.
    """

    name: str
    keep_last: int
    replicas: bool = False


@dataclass(frozen=True)
class StoragePlan:
    """The tiers of a campaign, fastest first, and what earlier jobs have left.

    Attributes:
        memory: where workers copy to.
        others: the nodes' slower tiers.
        durable: which all nodes share.
        buffers: of the memory tier, on each node.
        domains: failure domain of each node of the allocation; replicas are kept in another one. Empty: each is its own.
        durable_step: the newest step that is committed.
        durable_steps: all that are committed.
        invalidated: by roll-backs of earlier jobs.
    """

    memory: TierPlan
    others: tuple[TierPlan, ...]
    durable: TierPlan
    buffers: int
    domains: tuple[str, ...] = ()
    durable_step: int = 0
    durable_steps: tuple[int, ...] = ()
    invalidated: tuple[InvalidationRule, ...] = ()

    @property
    def node_tiers(self) -> tuple[TierPlan, ...]:
        """Those that each node has for itself."""
        return (self.memory, *self.others)

    @property
    def slower_tiers(self) -> tuple[TierPlan, ...]:
        """Those that snapshots are transferred to."""
        return (*self.others, self.durable)
