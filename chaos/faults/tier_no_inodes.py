"""A tier has no room for one more file."""

import errno
import itertools
import secrets
from pathlib import Path

from pydantic import Field

from chaos.fault import Aim, CannotInject, Evidence, Expectation, Outside
from chaos.injectors.context import InjectionContext
from chaos.primitives.tiers import find_tier, free, own_mount

MOST_FILES = 200_000


class TierNoInodes(Outside):
    """A tier has bytes left and no inodes: empty files take them all."""

    aim = Aim.NODE
    undone = "the files are removed"

    tier: str = Field("durable", description="its name, or `durable` or `memory`; nothing else may be on its file system")
    for_s: float = Field(5.0, gt=0, description="how long it lasts")

    def expects(self) -> Expectation:
        return Expectation(frozenset({"storage"}), frozenset({"degrade_tier"}))

    def inject(self, context: InjectionContext) -> Evidence:
        tier = find_tier(context, self.tier)
        own_mount(context, tier)
        left = free(tier.path)[1]
        if not 0 < left <= MOST_FILES:
            raise CannotInject(f"tier {tier.name} has room for {left or 'any number of'} files; at most {MOST_FILES} are made")
        directory = tier.path / f".filler-{secrets.token_hex(4)}"
        context.guard.add(["rm", "-rf", str(directory)])
        made = _fill(directory)
        left = free(tier.path)[1]
        if left:
            raise CannotInject(f"there is still room for {left} files on tier {tier.name}")
        context.hold(self.for_s)
        return {"directory": str(directory), "files": made, "left_files": left}


def _fill(directory: Path) -> int:
    """Make files until one cannot be made; how many."""
    directory.mkdir()
    for number in itertools.count():
        try:
            (directory / str(number)).touch()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return number
    raise AssertionError("unreachable")
