"""A file of a checkpoint is missing."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from chaos.fault import Evidence
from chaos.injectors.context import InjectionContext
from chaos.primitives.damage import Damage


class MissingChunk(Damage):
    """A shard file of the newest durable checkpoint is deleted."""

    tier: Literal["durable"] = Field("durable", description="whose newest checkpoint is hit")

    def damage(self, checkpoint: Path, context: InjectionContext) -> Evidence:
        path = max((each for each in checkpoint.rglob("c*") if each.is_file()), key=lambda each: (each.stat().st_size, str(each)))
        size = path.stat().st_size
        path.unlink()
        return {"file": str(path), "bytes": size}
