"""What looks like the newest checkpoint is none."""

import os
import shutil
from pathlib import Path
from typing import Literal

from pydantic import Field

from chaos.fault import CannotInject, Evidence
from chaos.injectors.context import InjectionContext
from chaos.primitives.damage import Damage
from checkpoint.naming import step_path, steps, temporary_path


class StaleLatest(Damage):
    """What looks like the newest checkpoint is an older one under a newer step's name, or one that was never finished.

    There is no pointer to the latest that could be stale: the names are all that there is.
    """

    tier: Literal["durable"] = Field("durable", description="where it lies")
    how: Literal["older", "unfinished"] = Field("older", description="which of the two")

    def damage(self, checkpoint: Path, context: InjectionContext) -> Evidence:
        root = checkpoint.parent
        oldest, newest = steps(root)[0], steps(root)[-1]
        if self.how == "older":
            target = step_path(root, newest + 1)
        else:
            target = temporary_path(root, newest + 1, 0)
        shutil.copytree(step_path(root, oldest), target)
        if self.how == "unfinished":
            os.truncate(target / "manifest.json", 10)
        if not target.is_dir():
            raise CannotInject(f"{target} is not there")
        return {"path": str(target), "of_step": oldest}
