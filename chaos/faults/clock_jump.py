"""A clock jumps."""

import sys
import time

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext

# $1: seconds to take back, $2: the clock minus the monotonic one, as it was. Does nothing where somebody has set it meanwhile.
_BACK = (
    "import sys, time; by, before = map(float, sys.argv[1:]); "
    "jumped = abs(time.time() - time.monotonic() - before - by) < 0.5 * abs(by); "
    "jumped and time.clock_settime(time.CLOCK_REALTIME, before + time.monotonic())"
)


class ClockJump(Outside):
    """The clock of a machine jumps, and back again, as when NTP sets it: of the machine as a whole, for Linux has no other."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    undone = "the clock is set to what it would be by now, by the monotonic clock"

    by_s: float = Field(6.0, description="by which it jumps; below zero: into the past")
    seconds: float = Field(1.0, gt=0, le=60, description="after which it jumps back")

    def expects(self) -> Expectation:
        return Expectation()

    def inject(self, context: InjectionContext) -> Evidence:
        before = time.time() - time.monotonic()
        context.guard.add([sys.executable, "-c", _BACK, repr(self.by_s), repr(before)])
        try:
            time.clock_settime(time.CLOCK_REALTIME, time.time() + self.by_s)
        except PermissionError as error:
            raise CannotInject(f"the clock cannot be set: {error}") from error
        jumped_s = time.time() - time.monotonic() - before
        context.hold(self.seconds)
        return {"jumped_s": round(jumped_s, 3)}
