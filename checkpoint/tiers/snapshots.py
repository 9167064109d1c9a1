"""Snapshots: a worker copies its state into a slab and computes on.

Owns the worker's side: the mapping of slabs, the copy, and the word to the keeper. Training stands still for the copy alone.
Nothing here waits for a disk, and nothing that goes wrong here stops training: a snapshot for which there is no slab is left
out.
"""

import json
import mmap
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint import direct, plan, points, state
from checkpoint import part as parts
from checkpoint.agreement import Ranks
from checkpoint.block import Block
from checkpoint.layout import ArrayInfo, Shard, Strip
from checkpoint.piece import Piece
from checkpoint.plan import Claim
from checkpoint.saving import agree, claim
from checkpoint.state import JSON
from checkpoint.tiers import blueprint, session
from checkpoint.tiers.cadence import Clock
from checkpoint.tiers.session import Control, Session
from checkpoint.tiers.slabs import STATE, fingerprint

READY_S = 60.0
_POLL_S = 0.001


@dataclass(frozen=True)
class Taken:
    """What became of a snapshot on this rank.

    Attributes:
        step: that it is of.
        taken: the bytes are the keeper's; otherwise there was no slab to copy them into.
        size_bytes: that this rank has copied.
        stall_s: for which training stood still.
    """

    step: int
    taken: bool
    size_bytes: int
    stall_s: float


class Snapshots:
    """Takes snapshots of one rank. All ranks make one, and call its methods alike.

    Args:
        path: of this node's session.
        group: one that carries objects (gloo does); None for the default group.

    Raises OSError, ValueError where the session cannot be read.
    """

    def __init__(self, path: Path, *, group: dist.ProcessGroup | None = None) -> None:
        self.session: Session = session.read(path)
        self._group = group
        self._ranks = Ranks(group)
        self._local = self._ranks.rank - self.session.first_rank
        self._control = Control(self.session.directory / "control")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._clock: Clock | None = None
        self._claims: list[Claim] = []
        self._shares: list[_Share] = []
        self._slabs: dict[int, _Mapped] = {}
        self._used = self._control.lent()[0] - 1

    def start(self, pieces: Sequence[Piece]) -> None:
        """Say what will be copied; the keeper makes slabs for it meanwhile. Collective.

        Raises CheckpointError where the ranks' pieces do not fit together.
        """
        self._clock = Clock(self.session.every, self.session.mtbf_s, time.monotonic())
        self._claims = [claim(piece) for piece in pieces]
        layout = agree(self._ranks, self._claims)
        directory = self.session.directory
        digest = blueprint.arrays_digest(layout.arrays)
        if self._local == 0 and not blueprint.arrays_path(directory, digest).exists():
            blueprint.write_arrays(directory, layout.arrays, layout.documents)
        self._shares = [
            _Share.of(piece, layout.arrays[layout.ordinals[piece.array]], layout.ordinals[piece.array]) for piece in pieces
        ]
        slots: dict[str, list[int]] = {}
        for share in self._shares:
            for shard, slot, count in share.strips:
                slots.setdefault(shard.path, []).extend(range(slot, slot + count))
        blueprint.write_slots(directory, self._ranks.rank, self.session.generation, digest, slots)
        self._slabs = {}
        self._tell({"say": "layout", "digest": digest})

    def due(self, step: int) -> frozenset[str]:
        """The tiers that want a snapshot of this step. Collective where a tier goes by time."""
        assert self._clock is not None, "start comes first"
        wanted = self._clock.due(step, time.monotonic())
        if not self._clock.timed or self._ranks.count == 1:
            return wanted
        told: list[Any] = [wanted]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        found: frozenset[str] = told[0]
        return found

    def left_out(self, taken: bool) -> bool:
        """Whether some rank has left a step out, and all must take it `again`. Collective.

        Args:
            taken: whether this rank has it.
        """
        first = self.session.first_rank
        told = self._ranks.all((taken, self._used))
        if all(has for has, _ in told):
            return False
        latest = max(used for _, used in told[first : first + self.session.ranks])
        if self._used < latest:  # the ranks of a node use the same slab: this one does without that which another has used
            self._used = latest
            self._tell({"say": "passed", "loan": latest})
        return True

    def take(
        self,
        step: int,
        pieces: Sequence[Piece],
        small: Mapping[str, JSON],
        tiers: frozenset[str],
        *,
        changed: bool = True,
        wait_s: float = 0.0,
        again: bool = False,
    ) -> Taken:
        """Copy the pieces' tensors; they may change again as soon as this returns.

        Args:
            step: that they are of.
            pieces: as they were in `start`, with whatever tensors hold the values now.
            small: the rest of the state, the same on all ranks.
            tiers: that are to have it.
            changed: whether anything but `small` has changed since the last snapshot; equal bytes are refused where it has.
            wait_s: how long to wait for a slab; without one, a snapshot that finds none is left out.
            again: the step counts although some rank has left it out before; see `left_out`.
        """
        began = time.perf_counter()
        index = self._borrow(wait_s)
        if index is None:
            self._tell({"say": "skipped", "step": step, "tiers": sorted(tiers)})
            return Taken(step, False, 0, time.perf_counter() - began)
        try:
            slab = self._mapped(index)
            points.reached("snapshot_borrowed")
            with suppress(FileNotFoundError):
                (slab.directory / parts.NAME).unlink()
            slab.copy(pieces)
            if self._local == 0:
                (slab.directory / STATE).write_text(json.dumps(state.plain(small), ensure_ascii=False))
        except OSError as error:  # somebody has deleted it, or there is no room for a page
            self._tell({"say": "broken", "step": step, "loan": self._used, "why": f"{error}", "errno": error.errno})
            return Taken(step, False, 0, time.perf_counter() - began)
        points.reached("snapshot_copied")
        stall_s = time.perf_counter() - began
        said = {"say": "taken", "step": step, "loan": self._used, "slab": index, "stall_s": stall_s, "tiers": sorted(tiers)}
        self._tell({**said, "changed": changed, "bytes": slab.size_bytes, "again": again})
        points.reached("snapshot_told")
        if self._clock is not None:
            self._clock.taken(tiers, stall_s, time.monotonic())
        return Taken(step, True, slab.size_bytes, stall_s)

    def ready(self, patience_s: float = READY_S) -> bool:
        """Wait until there are slabs, and touch their pages, so that the first snapshots are as fast as the others."""
        deadline = time.monotonic() + patience_s
        while True:
            loan, index = self._control.lent()
            if index is not None and loan > self._used:
                slabs = self.session.directory / session.SLABS
                like = fingerprint(slabs / f"slab-{index}")
                for path in sorted(slabs.glob("slab-*")):
                    if fingerprint(path) == like:  # others hold what workers of another layout have left
                        self._mapped(int(path.name.removeprefix("slab-")))
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Give back what is open; what was taken is the keeper's."""
        self._socket.close()
        for slab in self._slabs.values():
            slab.close()
        self._slabs = {}

    def _mapped(self, index: int) -> "_Mapped":
        """The slab, mapped; anew where the keeper has made it anew."""
        path = self.session.directory / session.SLABS / f"slab-{index}"
        slab = self._slabs.get(index)
        if slab is None or slab.inode != path.stat().st_ino:
            if slab is not None:
                slab.close()
            slab = self._slabs[index] = _Mapped(path, self._shares)
        return slab

    def _borrow(self, wait_s: float) -> int | None:
        """The slab for the next snapshot."""
        deadline = time.monotonic() + wait_s
        while True:
            loan, index = self._control.lent()
            if index is not None and loan > self._used:
                self._used = loan
                return index
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)

    def _tell(self, message: Mapping[str, Any]) -> None:
        text = json.dumps({"rank": self._ranks.rank, "generation": self.session.generation, **message}).encode()
        deadline = time.monotonic() + 1.0
        while True:
            try:
                self._socket.sendto(text, socket.MSG_DONTWAIT, str(self.session.socket))
                return
            except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                # Full for a moment, or the keeper is being started anew; without one the snapshot is lost, training is not.
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)


@dataclass(frozen=True)
class _Share:
    """The chunks of one piece that this rank writes."""

    info: ArrayInfo
    strips: Sequence[Strip]

    @classmethod
    def of(cls, piece: Piece, info: ArrayInfo, ordinal: int) -> "_Share":
        return cls(info, list(plan.share(info, ordinal, claim(piece))) if piece.data.numel() else [])


class _Mapped:
    """A slab in this process: for every piece the tensors in shared memory that its parts are copied to."""

    def __init__(self, directory: Path, shares: Sequence[_Share]) -> None:
        self.directory = directory
        self.inode = directory.stat().st_ino
        self._shares = shares
        self._maps: dict[str, mmap.mmap] = {}
        self._pairs: list[list[tuple[Any, Any]]] = [[] for _ in shares]
        self._known: list[tuple[Any, ...]] = [() for _ in shares]
        self.size_bytes = 0
        self._pinned: list[int] = []
        for share in shares:
            for shard, slot, count in share.strips:
                direct.populate(self._area(shard), shard.array.offset(slot), count * shard.array.slot_bytes)

    def _area(self, shard: Shard) -> mmap.mmap:
        area = self._maps.get(shard.path)
        if area is None:
            fd = os.open(self.directory / shard.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                area = self._maps[shard.path] = mmap.mmap(fd, shard.size_bytes)
            finally:
                os.close(fd)
        return area

    def _pin(self) -> None:
        """Page-lock the slab, so that a GPU copies into it by itself; where that is refused, copies take longer."""
        for shard, area in self._maps_of_shards():
            strips = [strip for share in self._shares for strip in share.strips if strip.shard is shard]
            start = shard.array.offset(min(strip.slot for strip in strips)) // direct.PAGE_BYTES * direct.PAGE_BYTES
            size = shard.array.offset(max(strip.slot + strip.length for strip in strips)) - start
            address = torch.frombuffer(area, dtype=torch.uint8, offset=start).data_ptr()
            if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0:  # type: ignore[no-untyped-call]
                self._pinned.append(address)

    def _maps_of_shards(self) -> list[tuple[Shard, mmap.mmap]]:
        shards = {strip.shard.path: strip.shard for share in self._shares for strip in share.strips}
        return [(shards[path], area) for path, area in self._maps.items()]

    def close(self) -> None:
        """Unlock what is page-locked."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned = []

    def copy(self, pieces: Sequence[Piece]) -> None:
        """Copy every piece's share."""
        self.size_bytes = 0
        onto_host = any(piece.data.is_cuda for piece in pieces)
        if onto_host and not self._pinned:
            self._pin()
        for number, (piece, share) in enumerate(zip(pieces, self._shares, strict=True)):
            data = piece.data.detach()
            key = (data.data_ptr(), data.dtype, data.stride(), data.device)
            if self._known[number] != key:
                block = Block(piece, share.info) if share.strips else None
                self._pairs[number] = [pair for strip in share.strips if block for pair in block.pairs(strip, self._slots(strip))]
                self._known[number] = key
            if data.is_cuda and self._pairs[number]:
                targets, sources = zip(*self._pairs[number], strict=True)
                torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            else:
                for target, source in self._pairs[number]:
                    target[...] = source
            self.size_bytes += sum(source.nbytes for _, source in self._pairs[number])
        if onto_host:
            torch.cuda.synchronize()

    def _slots(self, strip: Strip) -> torch.Tensor:
        """The bytes of a strip's slots."""
        array = strip.shard.array
        size = strip.length * array.slot_bytes
        return torch.frombuffer(self._area(strip.shard), dtype=torch.uint8, count=size, offset=array.offset(strip.slot))
