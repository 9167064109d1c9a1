"""A node cannot reach the coordinator, nor it the node; all else goes on."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork
from chaos.primitives import links, outage
from resilient.protocol.connection import parse_addresses


class CoordinatorUnreachable(Outside):
    """A node and the coordinator do not reach each other, while ranks go on talking to ranks (as with a firewall's new rule)."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the rules of iptables are removed"

    seconds: float = Field(5.0, gt=0, description="for which they do not")

    def expects(self) -> Expectation:
        return outage.of_a_node(self.seconds)

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        _, port = parse_addresses(context.driver_address(host.root))[0]
        host.make(links.cut_off_from_port(host.namespace, host.mark, port))
        context.hold(self.seconds)
        return {"host": host.name, "port": port, "dropped_packets": host.dropped()}
