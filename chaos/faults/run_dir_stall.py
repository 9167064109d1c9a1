"""The run directory does not answer."""

from pydantic import Field

from chaos.fault import Aim, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.mounts import change
from chaos.primitives.tiers import run_mount

REPORTED_AFTER_S = 6.0  # the driver bears with its run directory for 2 s


class RunDirStall(Outside):
    """The run directory's file system hangs: whoever writes there waits in the kernel, deaf to signals, until it goes on."""

    aim = Aim.RUN
    needs = frozenset({Need.ROOT})
    undone = "the file system is thawed"

    for_s: float = Field(8.0, gt=0, description="how long it lasts; from about 6 s on it must be reported")

    def expects(self) -> Expectation:
        return Expectation(
            frozenset({"storage"}),
            frozenset({"degrade", "degrade_tier"}),
            lost_steps=0,
            may_pass=self.for_s < REPORTED_AFTER_S,
        )

    def inject(self, context: InjectionContext) -> Evidence:
        mount = run_mount(context)
        context.guard.add(["fsfreeze", "-u", str(mount)])
        change(context.guard, ["fsfreeze", "-f", str(mount)])
        context.hold(self.for_s)
        return {"mount": str(mount), "frozen": True}
