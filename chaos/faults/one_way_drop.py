"""The link of a node carries packets in one direction only."""

from typing import Literal

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork
from chaos.primitives import links, outage


class OneWayDrop(Outside):
    """The link of a node carries packets in one direction only, and its carrier stays (as with half of a broken fibre)."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the rule of iptables is removed"

    lost: Literal["in", "out"] = Field("in", description="the direction that is lost")
    seconds: float = Field(5.0, gt=0, description="for which it is")

    def expects(self) -> Expectation:
        return outage.of_a_node(self.seconds)

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        chain, flag = ("INPUT", "-i") if self.lost == "in" else ("OUTPUT", "-o")
        host.make([links.dropped(host.namespace, chain, host.mark, flag, links.DEVICE)])
        context.hold(self.seconds)
        return {"host": host.name, "dropped_packets": host.dropped()}
