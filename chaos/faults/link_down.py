"""The link of a node is down for a while."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.hands.scene import Scene
from chaos.lab.network import HostNetwork
from chaos.means import links, outage


class LinkDown(Outside):
    """The link of a node is down for a while: its port of the switch loses the carrier, as with a pulled cable."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT, Need.LAB})
    site = "machine"
    undone = "the port of the switch is brought up"

    seconds: float = Field(5.0, gt=0, description="for which it is down")

    def expects(self) -> Expectation:
        return outage.of_a_node(self.seconds)

    def inject(self, scene: Scene) -> Evidence:
        host = HostNetwork(scene)
        before = host.carrier_downs()
        host.make([links.unplugged(host.switch, host.name)])
        scene.hold(self.seconds)
        return {"host": host.name, "carrier_downs": host.carrier_downs() - before}
