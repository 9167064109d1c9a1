"""The link of a node loses packets at random."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork
from chaos.primitives import links, outage


class PacketLoss(Outside):
    """The link of a node loses packets at random, both ways: each with the same probability."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the rules of iptables are removed"

    share: float = Field(0.1, gt=0, lt=1, description="of the packets that are lost")
    seconds: float = Field(10.0, gt=0, description="for which they are")

    def expects(self) -> Expectation:
        # TCP bears a loss of some percent; what is resent again and again makes silences of any length.
        return outage.of_a_node(outage.SHORT_S if self.share <= 0.2 else outage.SHORT_S + self.seconds)

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        host.make(links.lost_at_random(host.namespace, host.mark, self.share))
        context.hold(self.seconds)
        return {"host": host.name, "dropped_packets": host.dropped()}
