"""A tier is slow."""

import time

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.mounts import change
from chaos.primitives.tiers import find_tier, own_mount


class TierSlow(Outside):
    """Writing to a tier takes `factor` times as long: its file system is frozen for most of each period.

    Not a limit in bytes: what is written in between goes at full speed, and reading is as fast as ever. It holds for
    everybody who writes there, at whatever depth of buffers, which cgroups and delays of a device do not.
    """

    aim = Aim.NODE
    needs = frozenset({Need.ROOT})
    undone = "the file system is thawed"

    tier: str = Field("durable", description="its name; a mount of its own that can be frozen: ext4, xfs or btrfs")
    factor: float = Field(10.0, gt=1, description="so many times slower")
    period_s: float = Field(0.5, gt=0, description="of which all but one part in `factor` it stands still")
    for_s: float = Field(10.0, gt=0, description="how long it lasts")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}), may_pass=True)

    def inject(self, context: InjectionContext) -> Evidence:
        mount = own_mount(context, find_tier(context, self.tier))
        context.guard.add(["fsfreeze", "-u", str(mount)])
        began, over, frozen_s, periods = time.monotonic(), False, 0.0, 0
        while not over and time.monotonic() - began < self.for_s:
            change(context.guard, ["fsfreeze", "-f", str(mount)])
            since = time.monotonic()
            over = context.over(self.period_s * (1 - 1 / self.factor))
            change(context.guard, ["fsfreeze", "-u", str(mount)])
            frozen_s += time.monotonic() - since
            periods += 1
            over = over or context.over(self.period_s / self.factor)
        return {"mount": str(mount), "frozen_s": round(frozen_s, 3), "of_s": round(time.monotonic() - began, 3), "periods": periods}
