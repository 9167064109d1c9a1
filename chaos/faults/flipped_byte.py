"""A byte of a checkpoint is another one."""

import os
import random
from pathlib import Path

from pydantic import Field

from chaos.fault import CannotInject, Evidence
from chaos.injectors.context import InjectionContext
from chaos.primitives.damage import Damage
from checkpoint import shard_manifest
from checkpoint.metadata import NAME as METADATA
from checkpoint.tiers.copying import shards_of


class FlippedByte(Damage):
    """One byte of the newest checkpoint, anywhere in it, turns into another one; nothing else reports it."""

    seed: int = Field(0, description="of the place")

    def damage(self, checkpoint: Path, context: InjectionContext) -> Evidence:
        chance = random.Random(self.seed)
        path, offset = _in_a_part(checkpoint, chance) if self.tier == "memory" else _anywhere(checkpoint, chance)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.pread(fd, 1, offset)[0]
            after = before ^ chance.randrange(1, 256)
            os.pwrite(fd, bytes([after]), offset)
            if os.pread(fd, 1, offset)[0] != after:
                raise CannotInject(f"byte {offset} of {path} is still {before:#04x}")
        finally:
            os.close(fd)
        return {"file": str(path), "offset": offset, "before": f"{before:#04x}", "after": f"{after:#04x}"}


def _anywhere(checkpoint: Path, chance: random.Random) -> tuple[Path, int]:
    """Any byte of a committed checkpoint."""
    files = sorted(each for each in checkpoint.rglob("*") if each.is_file())
    (path,) = chance.choices(files, [each.stat().st_size for each in files])
    return path, chance.randrange(path.stat().st_size)


def _in_a_part(checkpoint: Path, chance: random.Random) -> tuple[Path, int]:
    """Any byte of the chunks that a node holds; the rest of its files is holes."""
    held = shard_manifest.read(checkpoint).chunks
    shards = shards_of((checkpoint / METADATA).read_bytes(), checkpoint)
    name, slot = chance.choice(sorted((name, slot) for name, sums in held.items() for slot in sums))
    array = shards[name].array
    return checkpoint / name, array.offset(slot) + chance.randrange(array.slot_bytes)
