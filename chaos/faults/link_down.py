"""The link of a node is down for a while."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork
from chaos.primitives import links, outage


class LinkDown(Outside):
    """The link of a node is down for a while: its port of the switch loses the carrier, as with a pulled cable."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the port of the switch is brought up"

    seconds: float = Field(5.0, gt=0, description="for which it is down")

    def expects(self) -> Expectation:
        return outage.of_a_node(self.seconds)

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        before = host.carrier_downs()
        host.make([links.unplugged(host.switch, host.name)])
        context.hold(self.seconds)
        return {"host": host.name, "carrier_downs": host.carrier_downs() - before}
