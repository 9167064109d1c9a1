"""The run directory can be read and not be written."""

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Need, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.mounts import as_listed, change, options
from chaos.primitives.tiers import run_mount

# $1: the mount, $2: as mountinfo writes it.
_UNDO = 'while [ "$(grep -cF " $2 " /proc/self/mountinfo)" -gt 1 ]; do umount "$1" || exit 1; done; mount -o remount,rw "$1"'


class RunDirReadOnly(Outside):
    """The run directory turns read-only, as a file system does that has met an error of its disk.

    The kernel refuses that while files are open for writing, as logs are. Then a read-only view is mounted over the directory: all
    that is opened, made or renamed from then on is refused, and files that are open stay writable.
    """

    aim = Aim.RUN
    needs = frozenset({Need.ROOT})
    undone = "it is mounted for writing again"

    for_s: float = Field(5.0, gt=0, description="how long it lasts")

    def expects(self) -> Expectation:
        # A writer whose files are open under a read-only view need not notice.
        return Expectation(frozenset({"storage"}), frozenset({"degrade", "degrade_tier"}), lost_steps=0, may_pass=True)

    def inject(self, context: InjectionContext) -> Evidence:
        mount = run_mount(context)
        context.guard.add(["sh", "-c", _UNDO, "sh", str(mount), as_listed(mount)])
        view = False
        try:
            change(context.guard, ["mount", "-o", "remount,ro", str(mount)])
        except CannotInject:
            view = True
            change(context.guard, ["mount", "--bind", str(mount), str(mount)])
            change(context.guard, ["mount", "-o", "remount,bind,ro", str(mount)])
        if "ro" not in options(mount):
            raise CannotInject(f"{mount} is still mounted for writing")
        context.hold(self.for_s)
        return {"mount": str(mount), "view": view, "options": sorted(options(mount))}
