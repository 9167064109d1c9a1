"""Copies from a GPU to a buffer, gathered: chunks are packed in the GPU's memory, and cross to the host as few large copies.

Owns the lists of what is copied to where, which are kept from snapshot to snapshot. `checkpoint.rounds` decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from checkpoint.block import Block
from checkpoint.device import Device
from checkpoint.layout import ChunkRun
from checkpoint.rounds import Numbered, Placed, plan_rounds

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copies:
    """Targets, and the source of each."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One more."""
        self.targets.append(target)
        self.sources.append(source)

    def extend(self, others: "Copies") -> None:
        """All of these too."""
        self.targets += others.targets
        self.sources += others.sources

    def begin(self, device: Device) -> None:
        """Have a GPU make them, if there are any."""
        if self.targets:
            device.copy(self.targets, self.sources)

    @property
    def size_bytes(self) -> int:
        """That are copied."""
        return sum(source.nbytes for source in self.sources)


@dataclass(frozen=True)
class _Packing:
    """What one local shard packs in a round: zeros where a chunk ends beyond the array, and then its numbers."""

    place: int
    zeros: Copies
    numbers: Copies


class Gathering:
    """The copies of local shards that are on one GPU.

    Args:
        all_runs: that they write.
        slots: gives the bytes of a run's slots in the buffer.
        stage: memory of the GPU; what is too large for it crosses chunk by chunk.
    """

    def __init__(self, all_runs: Sequence[Numbered], slots: Callable[[ChunkRun], torch.Tensor], stage: torch.Tensor) -> None:
        self._stage, self._slots = stage, slots
        rounds, alone = plan_rounds(all_runs, stage.nbytes)
        self._pieces: dict[int, list[tuple[int, Placed]]] = {number: [] for number, _ in all_runs}
        self._alone_runs: dict[int, list[ChunkRun]] = {number: [] for number, _ in all_runs}
        for place, each in enumerate(rounds):
            for number, placed in each.pieces:
                self._pieces[number].append((place, placed))
        for number, run in alone:
            self._alone_runs[number].append(run)
        self._crossings = [Copies() for _ in rounds]
        for crossings, each in zip(self._crossings, rounds, strict=True):
            for placed in each.crossings:
                crossings.add(slots(placed.run), self._staged(placed))
        self._packed: dict[int, list[_Packing]] = {}
        self._alone: dict[int, Copies] = {}

    def _staged(self, placed: Placed) -> torch.Tensor:
        return self._stage[placed.offset : placed.end]

    def renew(self, number: int, block: Block) -> int:
        """A local shard has another tensor than before, or its first; bytes that are copied of it."""
        self._packed[number] = [self._pack(place, block, placed) for place, placed in self._pieces[number]]
        alone = self._alone[number] = Copies()
        for run in self._alone_runs[number]:
            for target, source in block.pairs(run, self._slots(run)):
                alone.add(target, source)
        return alone.size_bytes + sum(packing.numbers.size_bytes for packing in self._packed[number])

    def let_go(self, number: int) -> None:
        """Copy no more of a local shard before it is renewed, and hold its tensor no longer."""
        self._packed.pop(number, None)
        self._alone.pop(number, None)

    def _pack(self, place: int, block: Block, placed: Placed) -> _Packing:
        packing, slots = _Packing(place, Copies(), Copies()), self._staged(placed)
        if not block.fills(placed.run):
            packing.zeros.add(slots, slots.new_zeros(1).expand(len(slots)))
        for target, source in block.boxes(placed.run, slots):
            packing.numbers.add(*_in_a_row(target, source))
        return packing

    def begin(self, device: Device, *, hold_back: bool) -> None:
        """Begin all copies.

        Args:
            hold_back: what the GPU is asked next may change the tensors: it does that once they are all read.
        """
        zeros, numbers = [Copies() for _ in self._crossings], [Copies() for _ in self._crossings]
        for packing in (packing for each in self._packed.values() for packing in each):
            zeros[packing.place].extend(packing.zeros)
            numbers[packing.place].extend(packing.numbers)
        for alone in self._alone.values():
            alone.begin(device)
        for place, crossings in enumerate(self._crossings):
            zeros[place].begin(device)
            numbers[place].begin(device)
            if hold_back and place == len(self._crossings) - 1:
                device.hold_back(device.mark())
            crossings.begin(device)
        if hold_back and not self._crossings:
            device.hold_back(device.mark())


def _in_a_row(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, as one row of integers where both are one: a kernel of the GPU copies many rows of one type at once."""
    bits = _BITS.get(target.element_size())
    if bits is None or not (target.is_contiguous() and source.is_contiguous()):
        return target, source
    return target.view(-1).view(bits), source.view(-1).view(bits)
