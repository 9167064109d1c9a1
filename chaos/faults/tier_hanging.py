"""A tier does not answer."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.hands.scene import Scene
from chaos.means.mounts import change
from chaos.means.places import own_mount, place

TOLD_AFTER_S = 32.0  # the snapshot daemon bears with a tier for 30 s


class TierHanging(Outside):
    """A tier hangs: whoever writes there waits in the kernel, deaf to signals, until it goes on. Reading goes on as before."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT})
    undone = "the file system is thawed"

    tier: str = Field("durable", description="its name; a mount of its own that can be frozen: ext4, xfs or btrfs")
    for_s: float = Field(5.0, gt=0, description="how long it lasts; from about 32 s on it must be told")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}), may_pass=self.for_s < TOLD_AFTER_S)

    def inject(self, scene: Scene) -> Evidence:
        mount = own_mount(scene, place(scene, self.tier))
        scene.guard.add(["fsfreeze", "-u", str(mount)])
        change(scene.guard, ["fsfreeze", "-f", str(mount)])
        scene.hold(self.for_s)
        return {"mount": str(mount), "frozen": True}
