"""A node's InfiniBand port is down for a while, by the site's own commands."""

import shlex
from pathlib import Path

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives import outage
from chaos.primitives.processes import until

PORTS = Path("/sys/class/infiniband")


class IbPort(Outside):
    """A node's InfiniBand port is down for a while, by the site's own commands; without them, nothing is done.

    For instance `down: ["ibportstate -D 0 1 disable"]`, `up: ["ibportstate -D 0 1 enable"]`, or what a site lets a job run.
    """

    aim = Aim.NODE
    undone = "the commands of `up`"

    down: list[str] = Field([], description="command lines that take it down, run on the node")
    up: list[str] = Field([], description="command lines that bring it up, which must do no harm where it is up")
    seconds: float = Field(5.0, gt=0, description="for which it is down")

    def expects(self) -> Expectation:
        return outage.of_a_node(self.seconds)

    def lacks(self) -> str:
        return "" if self.down and self.up else "no port is taken down unasked: `down` and `up` must say by which commands"

    def inject(self, context: InjectionContext) -> Evidence:
        if lacking := self.lacks():
            raise CannotInject(lacking)
        before = _states()
        context.check_undone(lambda: until(lambda: _states() == before, f"{before} was so before `down`, and is not again"))
        for line in reversed(self.up):  # the guard runs the last one first
            context.guard.add(shlex.split(line))
        for line in self.down:
            context.guard.run(shlex.split(line))
        until(lambda: _states() != before, f"no port has changed its state by `down`: {before or 'there is none'}")
        states = _states()
        context.hold(self.seconds)
        return {"down": self.down, "states": states}


def _states() -> dict[str, str]:
    """Of each port of this machine, as its driver tells it."""
    return {str(path.parent): path.read_text().strip() for path in sorted(PORTS.glob("*/ports/*/state"))}
