"""The nodes are parted into two halves that do not hear of each other."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.lab.network import HostNetwork, addresses
from chaos.primitives import links, outage


class Partition(Outside):
    """The nodes are parted into two groups that do not hear of each other (as by a switch between switches that fails)."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the rules of iptables are removed, on each host of the group"

    seconds: float = Field(5.0, gt=0, description="for which they are apart")
    hosts: int | None = Field(None, ge=1, description="in the group of the target, with it and those after it; null: half of all")

    def expects(self) -> Expectation:
        return outage.of_a_node(self.seconds)

    def inject(self, context: InjectionContext) -> Evidence:
        host = HostNetwork(context)
        everyone = list(host.hosts())
        first = everyone.index(host.name)
        turned = everyone[first:] + everyone[:first]
        count = min(self.hosts or len(everyone) // 2, len(everyone) - 1)
        group, others = turned[:count], turned[count:]
        for each in group:
            host.make(links.cut_off_from(host.namespace_of(each), host.mark, addresses(others)))
        context.hold(self.seconds)
        return {"group": group, "others": others, "dropped_packets": host.dropped(*group[1:])}
