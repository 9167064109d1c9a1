"""A tier is not there."""

import secrets
from pathlib import Path

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.mounts import change, mounted
from chaos.primitives.tiers import TargetTier, find_tier, own_mount

# $1: where it was put, $2: where it belongs. What was made in its place meanwhile is kept beside it.
_BACK = '[ -e "$1" ] || exit 0; [ ! -e "$2" ] || rmdir "$2" 2>/dev/null || mv -T "$2" "$1.meanwhile"; mv -T "$1" "$2"'
_MOUNTED_BACK = 'mountpoint -q "$1" || exit 0; mountpoint -q "$2" || mount --bind "$1" "$2"; umount -l "$1"'


class TierGone(Outside):
    """A tier is gone: unmounted (as root, where it is a mount), or its directory is elsewhere."""

    aim = Aim.NODE
    undone = "it is mounted, or moved, back"

    tier: str = Field("durable", description="its name; of one that is no mount, only the durable one")
    for_s: float = Field(5.0, gt=0, description="how long it lasts")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}))

    def inject(self, context: InjectionContext) -> Evidence:
        tier = find_tier(context, self.tier)
        try:
            mount = own_mount(context, tier)
        except CannotInject:
            return self._move(context, tier)
        return self._unmount(context, mount)

    def _move(self, context: InjectionContext, tier: TargetTier) -> Evidence:
        if tier.kind != "durable":
            raise CannotInject(f"tier {tier.name} is no mount of its own, and {tier.path} may be others' too")
        path = tier.path.resolve()
        aside = _aside(path)
        context.guard.add(["sh", "-c", _BACK, "sh", str(aside), str(path)])
        path.rename(aside)
        context.hold(self.for_s)
        return {"path": str(path), "aside": str(aside)}

    def _unmount(self, context: InjectionContext, mount: Path) -> Evidence:
        aside = _aside(mount)
        context.guard.add(["rmdir", str(aside)])
        aside.mkdir()
        context.guard.add(["sh", "-c", _MOUNTED_BACK, "sh", str(aside), str(mount)])
        change(context.guard, ["mount", "--bind", str(mount), str(aside)])  # so that it is not lost altogether
        change(context.guard, ["umount", "-l", str(mount)])
        if mounted(mount):
            raise CannotInject(f"something is still mounted at {mount}")
        context.hold(self.for_s)
        return {"mount": str(mount), "aside": str(aside)}


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}-gone-{secrets.token_hex(4)}")
