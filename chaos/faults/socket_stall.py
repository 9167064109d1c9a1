"""Nothing reaches a rank through its connections for a while."""

import time

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives import outage, sockets

TAKE_S = 10.0  # for something to be sent to it


class SocketStall(Outside):
    """Nothing reaches a rank through its TCP connections for a while, and nobody is told (as with a link that drops all).

    No root is needed: a filter on each socket drops what comes in. TCP sends it again, so that a stall lasts up to twice as long.
    """

    aim = Aim.RANK
    undone = "the filters are taken off the sockets"

    seconds: float = Field(5.0, gt=0, description="for which nothing arrives")

    def expects(self) -> Expectation:
        return outage.of_a_rank(self.seconds)

    def inject(self, context: InjectionContext) -> Evidence:
        process = context.worker()
        context.guard.add(sockets.undo(process))
        with sockets.borrowed(process) as connections:  # not for longer: borrowed ones stay open when the rank is killed
            for each in connections.values():
                sockets.deafen(each)
            before = sum(map(sockets.dropped, connections.values()))
            deadline = time.monotonic() + TAKE_S
            while not (dropped := sum(map(sockets.dropped, connections.values())) - before):
                if time.monotonic() > deadline or context.over(0.005):
                    raise CannotInject(f"nothing was sent to rank {context.target.rank} that could be dropped")
            peers = list(connections)
        context.hold(self.seconds)
        return {"pid": process.pid, "peers": peers, "dropped_packets": dropped}
