"""A tier can be read and not be written."""

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.mounts import change, options
from chaos.primitives.tiers import find_tier, own_mount


class TierReadOnly(Outside):
    """A tier's file system turns read-only, as one does that has met an error of its disk."""

    aim = Aim.NODE
    needs = frozenset({Need.ROOT})
    undone = "it is mounted for writing again"
    not_tiers = frozenset({"memory"})

    tier: str = Field("durable", description="its name; a mount of its own, and not the tier in memory, whose files stay open")
    for_s: float = Field(5.0, gt=0, description="how long it lasts")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}))

    def inject(self, context: InjectionContext) -> Evidence:
        mount = own_mount(context, find_tier(context, self.tier))
        context.guard.add(["mount", "-o", "remount,rw", str(mount)])
        change(context.guard, ["mount", "-o", "remount,ro", str(mount)], patiently=True)
        if "ro" not in options(mount):
            raise CannotInject(f"{mount} is still mounted for writing")
        context.hold(self.for_s)
        return {"mount": str(mount), "options": sorted(options(mount))}
