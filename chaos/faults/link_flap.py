"""The link of a node goes down and comes back, again and again."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork
from chaos.primitives import links, outage


class LinkFlap(Outside):
    """The link of a node flaps: it goes down and comes back, again and again."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the port of the switch is brought up"

    times: int = Field(3, ge=1, description="how often it goes down")
    down_s: float = Field(1.0, gt=0, description="for which it is down each time")
    up_s: float = Field(2.0, gt=0, description="for which it is up in between")

    def expects(self) -> Expectation:
        # What counts is the longest outage at a stretch: between two, transports catch up, if there is time for it.
        return outage.of_a_node(self.down_s if self.up_s >= self.down_s else self.times * (self.down_s + self.up_s))

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        before = host.carrier_downs()
        host.make([links.unplugged(host.switch, host.name)])
        for _ in range(self.times - 1):
            context.hold(self.down_s)
            context.guard.run(links.port(host.switch, host.name, up=True))
            context.hold(self.up_s)
            context.guard.run(links.port(host.switch, host.name, up=False))
        context.hold(self.down_s)
        return {"host": host.name, "carrier_downs": host.carrier_downs() - before}
