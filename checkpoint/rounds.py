"""In which rounds a rank's chunks cross from a GPU to the host: what is packed where, and what crosses as one copy. Pure.

A copy of its own for each chunk, of 256 to 512 KiB and for norms and biases of a few, costs the host some 10 us to ask for, in
which the bus could carry as much again (25 to 50 GB/s). Slots that are neighbours in a file can cross at once, as what lies between
their chunks is written afterwards. So they are packed as they lie in the file into a piece of the GPU's memory, the stage; what it
cannot hold at once follows in further rounds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpoint.layout import PAGE_BYTES, ChunkRun

STAGE_BYTES = 64 << 20
"""Of a GPU's memory. A round takes 1.3 ms at 50 GB/s, and to ask for it some 50 us."""


class Numbered(NamedTuple):
    """Slots that one local shard, by its number, fills."""

    number: int
    run: ChunkRun


class Placed(NamedTuple):
    """Slots, and where in the stage they are packed."""

    run: ChunkRun
    offset: int

    @property
    def end(self) -> int:
        """Where in the stage they end."""
        return self.offset + self.run.length * self.run.shard.array.slot_bytes


@dataclass(frozen=True)
class Round:
    """What is in the stage at one time.

    Attributes:
        pieces: by the number of the local shard that packs them.
        crossings: the same slots, those together that cross as one copy.
    """

    pieces: list[tuple[int, Placed]] = field(default_factory=list)
    crossings: list[Placed] = field(default_factory=list)


def plan_rounds(all_runs: Iterable[Numbered], stage_bytes: int) -> tuple[list[Round], list[Numbered]]:
    """The rounds, and the runs of which already one slot is larger than the stage."""
    rounds: list[Round] = []
    alone: list[Numbered] = []
    used = stage_bytes  # of the last round
    for number, run in sorted(all_runs, key=lambda each: (each.run.shard.path, each.run.slot)):
        size, slot = run.shard.array.slot_bytes, run.slot
        if size > stage_bytes:
            alone.append(Numbered(number, run))
            continue
        while slot < run.slot + run.length:
            if used + size > stage_bytes:
                rounds.append(Round())
                used = 0
            placed = Placed(run.part(slot, slot + (stage_bytes - used) // size), used)
            rounds[-1].pieces.append((number, placed))
            _cross(rounds[-1].crossings, placed)
            slot += placed.run.length
            used = -(-placed.end // PAGE_BYTES) * PAGE_BYTES  # slots have whole pages, but those of arrays without dimensions
    return rounds, alone


def _cross(crossings: list[Placed], placed: Placed) -> None:
    """Add slots to what crosses; neighbours of the last ones in their file cross with them."""
    before = crossings[-1] if crossings else None
    if before is not None and (before.run.shard, before.run.slot + before.run.length) == (placed.run.shard, placed.run.slot):
        joined = ChunkRun(before.run.shard, before.run.slot, before.run.length + placed.run.length)
        crossings[-1] = Placed(joined, before.offset)
    else:
        crossings.append(placed)
