"""A tier has no room left."""

import secrets
import time

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.filling import LEAST_BYTES, fill
from chaos.primitives.tiers import find_tier, free, own_mount

DEFAULT_MIB = 4096
AGAIN_S = 0.2


class TierFull(Outside):
    """A tier is full: a file takes all room that is left, and what gets free meanwhile."""

    aim = Aim.NODE
    undone = "the file is removed"

    tier: str = Field("durable", description="its name, or `durable` or `memory`")
    for_s: float = Field(5.0, gt=0, description="how long it lasts")
    limit_mib: int | None = Field(
        None,
        gt=0,
        description="most to write. Without it, 4096, and only where nothing else is on the tier's file system",
    )

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}))

    def inject(self, context: InjectionContext) -> Evidence:
        tier = find_tier(context, self.tier)
        if self.limit_mib is None:
            own_mount(context, tier)
        left, limit = free(tier.path)[0], (self.limit_mib or DEFAULT_MIB) << 20
        if left > limit:
            raise CannotInject(f"tier {tier.name} has {left >> 20} MiB left, and no more than {limit >> 20} may be written")
        filler = tier.path / f".filler-{secrets.token_hex(4)}"
        context.guard.add(["rm", "-f", str(filler)])
        size = fill(filler)
        left = free(tier.path)[0]
        if left > 16 * LEAST_BYTES:
            raise CannotInject(f"{left} bytes are left on tier {tier.name}")
        deadline = time.monotonic() + self.for_s
        while time.monotonic() < deadline and not context.over(AGAIN_S):
            fill(filler)
        return {"file": str(filler), "bytes": size, "left_bytes": left}
