"""A node's snapshots are lost."""

from dataclasses import replace

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.damage import lose
from chaos.primitives.tiers import find_tier


class SnapshotLost(Outside):
    """What a node holds on one of its tiers is deleted while the run goes on, replicas for its buddy included."""

    aim = Aim.NODE
    undone = "not needed: the next snapshot is a new one"
    not_tiers = frozenset({"durable"})

    tier: str = Field("memory", description="its name, or `memory`; not the durable one")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}), may_pass=True)

    def inject(self, context: InjectionContext) -> Evidence:
        tier = find_tier(context, self.tier)
        if tier.kind == "durable":
            raise CannotInject(f"tier {tier.name} is no node's own")
        held = sorted(path.name for path in tier.root.glob("step-*"))
        gone = lose(replace(tier, roots=(tier.root,)), context.guard)
        if not gone:
            raise CannotInject(f"node {context.target.node} has nothing at {tier.root}")
        return {"directories": gone, "held": held}
