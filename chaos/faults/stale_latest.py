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
        for of_step in steps(root):  # the oldest; the run may delete it meanwhile
            newest = steps(root)[-1]
            target = temporary_path(root, newest + 1, 0)
            try:
                shutil.copytree(step_path(root, of_step), target)
            except (shutil.Error, FileNotFoundError):
                shutil.rmtree(target, ignore_errors=True)
                continue
            if self.how == "unfinished":
                os.truncate(target / "manifest.json", 10)
            else:
                target = target.rename(step_path(root, newest + 1))
            return {"path": str(target), "of_step": of_step}
        raise CannotInject(f"no checkpoint in {root} stays there for as long as it takes to copy it")
