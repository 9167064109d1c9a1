"""Places: where the tiers of a run lie, which file systems are under them, and who else would be hit there.

Owns finding them, from the run directory's `storage.json` and from the kernel. Changes nothing.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.fault import CannotInject
from chaos.injectors.context import InjectionContext
from resilient import storage


@dataclass(frozen=True)
class TargetTier:
    """A tier.

    Attributes:
        kind: `memory`, `node` or `durable`.
        root: where the node that is aimed at has its parts, or where committed checkpoints are.
        roots: of every node; of the durable tier the one.
        path: the directory of the config, under which all nodes have theirs.
    """

    name: str
    kind: str
    root: Path
    roots: tuple[Path, ...]
    path: Path

    def mount(self) -> Path:
        """Where the file system under it is mounted. Raises OSError."""
        found = self.path.resolve()
        while found != found.parent and found.stat().st_dev == found.parent.stat().st_dev:
            found = found.parent
        return found


def find_tiers(context: InjectionContext) -> list[TargetTier]:
    """All tiers of the run, fastest first.

    Raises:
        CannotInject: the run was never started.
    """
    try:
        tiers: list[dict[str, Any]] = storage.read(context.run_dir)["tiers"]
    except (OSError, ValueError) as error:
        raise CannotInject(f"{context.run_dir} does not say where its tiers are: {error}") from None
    found = []
    for tier in tiers:
        roots = tuple(Path(root) for root in tier["roots"])
        mine = roots[0 if tier["durable"] else context.target.node or 0]
        found.append(TargetTier(tier["name"], tier["kind"], mine, roots, mine if tier["durable"] else mine.parent.parent))
    return found


def find_tier(context: InjectionContext, name: str) -> TargetTier:
    """The tier of a name, or of a kind: `durable`, or `memory`.

    Raises:
        CannotInject: there is none, or it is not there.
    """
    every = find_tiers(context)
    found = [each for each in every if each.name == name] or [each for each in every if each.kind == name]
    if not found:
        raise CannotInject(f"there is no tier {name!r}; there are {', '.join(each.name for each in every)}")
    if not found[0].path.is_dir():
        raise CannotInject(f"tier {found[0].name} is not at {found[0].path}")
    return found[0]


def own_mount(context: InjectionContext, tier: TargetTier) -> Path:
    """The mount of a tier that has a file system of its own.

    Raises:
        CannotInject: something else lies there that would be hit as well.
    """
    device = tier.path.stat().st_dev
    others = [Path("/"), Path("/dev/shm"), Path(tempfile.gettempdir()), Path.home(), context.run_dir]
    others += [each.path for each in find_tiers(context) if each.name != tier.name]
    for other in others:
        if other.exists() and other.stat().st_dev == device:
            raise CannotInject(f"tier {tier.name} lies on the same file system as {other}, which would be hit too")
    return tier.mount()


def run_mount(context: InjectionContext) -> Path:
    """The mount of a run directory that has a file system of its own. Tiers inside of it are hit as well.

    Raises:
        CannotInject: something else lies there.
    """
    device = context.run_dir.stat().st_dev
    others = [Path("/"), Path("/dev/shm"), Path(tempfile.gettempdir()), Path.home()]
    others += [each.path for each in find_tiers(context) if not each.path.is_relative_to(context.run_dir)]
    for other in others:
        if other.exists() and other.stat().st_dev == device:
            raise CannotInject(
                f"the run directory {context.run_dir} lies on the same file system as {other}, which would be hit too"
            )
    return TargetTier("run directory", "run", context.run_dir, (), context.run_dir).mount()


def free(path: Path) -> tuple[int, int]:
    """Bytes and files that may still be added to a file system, without what it keeps for itself."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_favail
