"""The link of a node is slow."""

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork
from chaos.primitives import links


class BandwidthCap(Outside):
    """The link of a node is slow, both ways (a token bucket on each of its ends)."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the token buckets are removed"

    mbit_per_s: float = Field(8.0, ge=0.1, description="megabits a second that get through")
    seconds: float = Field(10.0, gt=0, description="for which no more do")

    def expects(self) -> Expectation:
        return Expectation(actions=frozenset({"report"}))

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        ends = (host.namespace, links.DEVICE), (host.switch, host.name)
        host.make(links.capped(namespace, device, host.mark, self.mbit_per_s) for namespace, device in ends)
        context.hold(self.seconds)
        held_back = sum(host.held_back(*end) for end in ends)
        if not held_back:
            raise CannotInject(f"host {host.name} did not send {self.mbit_per_s:g} Mbit a second, nor was it sent that much")
        return {"host": host.name, "held_back_packets": held_back}
