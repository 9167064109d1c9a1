"""A rank is slow."""

import time

from pydantic import Field

from chaos.fault import Expectation, Inside
from chaos.injectors.context import RankContext


class SlowRank(Inside):
    """A rank needs so many times as long for its own part of each step, as on a core that it must share; it ends by itself."""

    factor: float = Field(3.0, gt=1, description="of the time that its training thread computes in a step")
    least_ms: float = Field(40.0, ge=0, description="by which a step gets longer at the least, however little is computed in it")
    seconds: float = Field(20.0, gt=0, description="for which it is slow")

    def expects(self) -> Expectation:
        # Where steps are so long that too few come in this time, nobody can tell.
        return Expectation(frozenset({"straggler"}), frozenset({"report", "replace_node"}), culprit=True, may_pass=True)

    def strike(self, context: RankContext) -> None:
        until = time.monotonic() + self.seconds
        own_s = time.thread_time()

        def follow(phase: str | None, step: int) -> bool:
            nonlocal own_s
            if phase is None:
                work(max((self.factor - 1) * (time.thread_time() - own_s), self.least_ms / 1000))
                own_s = time.thread_time()
            return time.monotonic() < until

        context.follow(follow)


def work(seconds: float) -> None:
    """Compute for so long; its name is in the stacks."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
