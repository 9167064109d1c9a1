"""A tier does not answer."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.mounts import change
from chaos.primitives.tiers import find_tier, own_mount

REPORTED_AFTER_S = 32.0  # the snapshot daemon bears with a tier for 30 s


class TierHanging(Outside):
    """A tier hangs: whoever writes there waits in the kernel, deaf to signals, until it goes on. Reading goes on as before."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT})
    undone = "the file system is thawed"

    tier: str = Field("durable", description="its name; a mount of its own that can be frozen: ext4, xfs or btrfs")
    for_s: float = Field(5.0, gt=0, description="how long it lasts; from about 32 s on it must be reported")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}), may_pass=self.for_s < REPORTED_AFTER_S)

    def inject(self, context: InjectionContext) -> Evidence:
        mount = own_mount(context, find_tier(context, self.tier))
        context.guard.add(["fsfreeze", "-u", str(mount)])
        change(context.guard, ["fsfreeze", "-f", str(mount)])
        context.hold(self.for_s)
        return {"mount": str(mount), "frozen": True}
