"""The run directory has no room left."""

import secrets
import time

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.filling import LEAST_BYTES, fill
from chaos.primitives.tiers import free, run_mount

MOST_MIB = 4096
AGAIN_S = 0.2


class RunDirFull(Outside):
    """The run directory's file system is full: a file takes all room that is left, and what gets free meanwhile."""

    aim = Aim.RUN
    undone = "the file is removed"

    for_s: float = Field(5.0, gt=0, description="how long it lasts")

    def expects(self) -> Expectation:
        # What fits into the last block of the ledger and the metrics is still written: nobody need notice.
        return Expectation(frozenset({"storage"}), frozenset({"degrade", "degrade_tier"}), lost_steps=0, may_pass=True)

    def inject(self, context: InjectionContext) -> Evidence:
        mount = run_mount(context)
        left = free(mount)[0]
        if left > MOST_MIB << 20:
            raise CannotInject(f"{mount} has {left >> 20} MiB left, and no more than {MOST_MIB} may be written")
        filler = mount / f".filler-{secrets.token_hex(4)}"
        context.guard.add(["rm", "-f", str(filler)])
        size = fill(filler)
        left = free(mount)[0]
        if left > 16 * LEAST_BYTES:
            raise CannotInject(f"{left} bytes are left on {mount}")
        deadline = time.monotonic() + self.for_s
        while time.monotonic() < deadline and not context.over(AGAIN_S):
            fill(filler)
        return {"file": str(filler), "bytes": size, "left_bytes": left}
