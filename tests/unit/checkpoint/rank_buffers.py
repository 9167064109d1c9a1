"""A rank's buffer in real files, a state to put there, and how much of it the page tables have."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from checkpoint import slots
from checkpoint.device import StandIn
from checkpoint.local_shard import LocalShard, local_shard_of
from checkpoint.plan import plan
from checkpoint.saving import spec_of
from checkpoint.tiers.mapped import MappedBuffer, WritePlan

LAYERS = 32
KINDS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")


class Buffer:
    """A buffer in real files, and the chunks that a rank writes there.

    Args:
        ranks: the local shards of each.
    """

    def __init__(self, directory: Path, ranks: Sequence[Sequence[LocalShard]], rank: int = 0) -> None:
        self.directory = directory
        infos = plan([[spec_of(each) for each in mine] for mine in ranks])
        ordinals = {info.name: number for number, info in enumerate(infos)}
        for shard in (shard for info in infos for shard in info.shards.values()):
            (directory / shard.path).parent.mkdir(exist_ok=True, parents=True)
            with (directory / shard.path).open("wb") as file:
                file.truncate(shard.size_bytes)
        self.plans = [WritePlan.of(each, infos[ordinals[each.array]], ordinals[each.array]) for each in ranks[rank]]

    def mapped(self, gpu: StandIn | None) -> MappedBuffer:
        return MappedBuffer(self.directory, self.plans, gpu)

    def sealed(self) -> dict[str, bytes]:
        """Its files, once the daemon has put checksums behind the rank's chunks."""
        found = {
            str(path.relative_to(self.directory)): bytearray(path.read_bytes())
            for path in self.directory.rglob("*")
            if path.is_file()
        }
        for shard, slot, count in (run for each in self.plans for run in each.chunk_runs):
            start = shard.array.offset(slot)
            slots.seal(shard.array, memoryview(found[shard.path])[start : start + count * shard.array.slot_bytes])
        return {path: bytes(data) for path, data in found.items()}


def transformer() -> list[LocalShard]:
    """A small model, with norms and biases, and the moments of its optimizer."""
    shapes = {"query": (48, 32), "key": (48, 32), "value": (48, 32), "out": (32, 48), "up": (128, 32), "down": (32, 128)}
    vectors = {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    norms = {f"norm_{which}.{part}": (32,) for which in ("attention", "mlp") for part in ("weight", "bias")}
    everything: dict[str, tuple[int, ...]] = {**{f"{name}.weight": shape for name, shape in shapes.items()}, **vectors, **norms}
    return [
        local_shard_of(f"{kind}/blocks.{name}", torch.randn(*shape), stack=(layer, LAYERS))
        for layer in range(LAYERS)
        for name, shape in everything.items()
        for kind in KINDS
    ]


def resident_kib(directory: Path) -> int:
    """Of files below a directory, what this process's page tables have."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = str(directory) in line
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found
