"""A checkpoint was not written to its end."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from chaos.fault import CannotInject, Evidence
from chaos.injectors.context import InjectionContext
from chaos.primitives.damage import Damage


class TornWrite(Damage):
    """A file of the newest durable checkpoint ends in its middle, as after a crash of a file server that had promised more."""

    tier: Literal["durable"] = Field("durable", description="whose newest checkpoint is hit")

    def damage(self, checkpoint: Path, context: InjectionContext) -> Evidence:
        path = max((each for each in checkpoint.rglob("c*") if each.is_file()), key=lambda each: (each.stat().st_size, str(each)))
        size = path.stat().st_size
        os.truncate(path, size // 2)
        if path.stat().st_size != size // 2:
            raise CannotInject(f"{path} was not truncated")
        return {"file": str(path), "bytes": size // 2, "of_bytes": size}
