"""Slabs: shared memory that workers copy their state into, laid out as a part of a checkpoint.

A slab is a directory of shard files whose pages are there and stay: copying into pages that were touched before is four times
as fast as into fresh ones. A slab is *lent* to the workers, then *sealed*: every chunk gets its checksum, `part.json` is
written, and a link `step-N` names it. A worker that writes into a slab removes `part.json` first, so a half-written slab is
nobody's part.

Owns the slabs of one node. Only the keeper makes one.
"""

import json
import mmap
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import crc32c

from checkpoint import part as parts
from checkpoint import points, slots
from checkpoint.errors import DamagedCheckpoint
from checkpoint.layout import Shard
from checkpoint.manifest import FileEntry
from checkpoint.metadata import NAME as METADATA
from checkpoint.metadata import with_attributes
from checkpoint.naming import step_of, step_path
from checkpoint.part import Part
from checkpoint.source import Source
from checkpoint.tiers.blueprint import Blueprint

_PRINT = ".blueprint"
STATE = ".state.json"
"""What the first rank of a node leaves in a slab: the small state, which sealing puts into the root's metadata."""


@dataclass
class Slab:
    """One slab.

    Attributes:
        part: what it holds, once sealed.
        lent: workers may be writing into it.
        fits: it is laid out for the workers of today.
        pins: copies that are being made of it.
    """

    index: int
    directory: Path
    part: Part | None = None
    lent: bool = False
    fits: bool = False
    pins: int = 0
    maps: dict[str, mmap.mmap] = field(default_factory=dict)

    def view(self, shard: Shard) -> memoryview:
        """The bytes of a shard file."""
        area = self.maps.get(shard.path)
        if area is None:
            fd = os.open(self.directory / shard.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                area = self.maps[shard.path] = mmap.mmap(fd, shard.size_bytes)
            finally:
                os.close(fd)
        return memoryview(area)


def fingerprint(directory: Path) -> str:
    """What a slab is laid out for; empty where that is not known."""
    try:
        return (directory / _PRINT).read_text()
    except FileNotFoundError:
        return ""


class Slabs:
    """The slabs of one node.

    Args:
        root: where they are; what an earlier keeper left there is taken over.
        count: how many to make.
    """

    def __init__(self, root: Path, count: int) -> None:
        self.root = root
        self.blueprint: Blueprint | None = None
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._slabs = [Slab(index, root / f"slab-{index}") for index in range(count)]
        self._keep: Callable[[Part], bool] = lambda part: True
        self.rescan()

    def rescan(self) -> None:
        """Find out from the disk what every slab holds; nothing is lent any more."""
        for slab in self._slabs:
            slab.lent = False
            try:
                slab.part = parts.read(slab.directory)
            except DamagedCheckpoint:
                slab.part = None
        held = {slab.part.step: slab for slab in self._slabs if slab.part is not None}
        for path in self.root.glob("step-*"):
            step = step_of(path)
            if step not in held or (path.is_symlink() and path.readlink().name != held[step].directory.name):
                path.unlink(missing_ok=True)
        for step, slab in held.items():
            self._link(step, slab)

    def parts(self) -> dict[int, Part]:
        """What is held, by step."""
        return {slab.part.step: slab.part for slab in self._slabs if slab.part is not None}

    def find(self, step: int, generation: int) -> Slab | None:
        """The slab that holds a step."""
        for slab in self._slabs:
            if slab.part is not None and (slab.part.step, slab.part.generation) == (step, generation):
                return slab
        return None

    def keep(self, wanted: Callable[[Part], bool]) -> None:
        """Which parts may not be overwritten from now on; at first none may."""
        self._keep = wanted

    def prepare(self, blueprint: Blueprint) -> None:
        """Make every slab fit that holds nothing which is needed. They may be lent afterwards.

        Raises OSError where there is no room.
        """
        for slab in self._slabs:
            slab.fits = fingerprint(slab.directory) == blueprint.digest
            if not slab.fits and not (slab.lent or slab.pins or (slab.part and self._keep(slab.part))):
                self._make(slab, blueprint)
                slab.fits = True
        self.blueprint = blueprint

    @property
    def misfits(self) -> bool:
        """Whether there are slabs of another layout: of a generation with other nodes."""
        return self.blueprint is not None and not all(slab.fits for slab in self._slabs)

    def doubt(self, index: int) -> None:
        """A slab could not be written to: it is not lent until it was prepared again."""
        self._slabs[index].fits = False

    def retire(self) -> None:
        """Lend nothing until slabs are prepared again: the next workers may need others."""
        self.blueprint = None

    def renew(self) -> None:
        """Drop what was lent and not sealed: somebody may still write into it."""
        for slab in self._slabs:
            if slab.part is None:
                slab.maps = {}
                shutil.rmtree(slab.directory, ignore_errors=True)

    def lend(self) -> int | None:
        """Choose a slab for the next snapshot: an empty one, or the oldest that need not be kept; None where there is none."""
        free = [slab for slab in self._slabs if slab.fits and not (slab.lent or slab.pins or (slab.part and self._keep(slab.part)))]
        if self.blueprint is None or not free:
            return None
        slab = min(free, key=lambda each: (each.part is not None, each.part.step if each.part else 0))
        slab.lent = True
        return slab.index

    def give_back(self, index: int) -> None:
        """The workers are done with a slab, or dead."""
        self._slabs[index].lent = False

    def seal(self, index: int, step: int, generation: int, node: int, nodes: int, pool: Executor) -> Part:
        """Checksum what the workers have written and make it the part of a step. Raises OSError, ValueError."""
        assert self.blueprint is not None
        blueprint, slab = self.blueprint, self._slabs[index]
        slab.part = None
        with suppress(FileNotFoundError):
            (slab.directory / parts.NAME).unlink()
        points.reached("slab_taken")
        views = {path: slab.view(blueprint.shards[path]) for path in blueprint.slots}
        paths = sorted(blueprint.slots, key=lambda path: -len(blueprint.slots[path]))
        sums = list(pool.map(lambda path: _seal(blueprint.shards[path], blueprint.stretches(path), views[path]), paths))
        points.reached("slab_summed")
        state = json.loads((slab.directory / STATE).read_bytes())
        root = with_attributes(blueprint.documents[METADATA].encode(), step, generation, state)
        (slab.directory / METADATA).write_bytes(root)
        documents = {**{name: text.encode() for name, text in blueprint.documents.items()}, METADATA: root}
        files = {name: FileEntry(len(text), crc32c.crc32c(text)) for name, text in documents.items()}
        part = Part(step, generation, node, nodes, blueprint.size_bytes, files, dict(zip(paths, sums, strict=True)))
        new = slab.directory / f"{parts.NAME}.new"
        new.write_bytes(parts.encode(part))
        points.reached("slab_described")
        new.replace(slab.directory / parts.NAME)
        points.reached("slab_sealed")
        for other in self._slabs:
            if other.part is not None and other.part.step == step:
                (other.directory / parts.NAME).unlink(missing_ok=True)  # of a past that was left
                other.part = None
        slab.part, slab.lent = part, False
        self._link(step, slab)
        return part

    def forget(self, step: int) -> None:
        """Let a step go."""
        for slab in self._slabs:
            if slab.part is not None and slab.part.step == step:
                (slab.directory / parts.NAME).unlink(missing_ok=True)
                slab.part = None
        step_path(self.root, step).unlink(missing_ok=True)

    def clear(self) -> None:
        """Give the memory back."""
        for slab in self._slabs:
            slab.maps, slab.part = {}, None
        shutil.rmtree(self.root, ignore_errors=True)

    def _link(self, step: int, slab: Slab) -> None:
        for path in self.root.glob("step-*"):
            if path.is_symlink() and path.readlink().name == slab.directory.name and step_of(path) != step:
                path.unlink(missing_ok=True)
        new = self.root / f".link-{slab.index}"  # two steps may be sealed at the same time
        new.unlink(missing_ok=True)
        new.symlink_to(slab.directory.name)
        new.replace(step_path(self.root, step))

    def _make(self, slab: Slab, blueprint: Blueprint) -> None:
        slab.maps, slab.part = {}, None
        shutil.rmtree(slab.directory, ignore_errors=True)
        slab.directory.mkdir(parents=True)
        points.reached("slab_made")
        for name, text in blueprint.documents.items():
            path = slab.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, shard in blueprint.shards.items():
            fd = os.open(slab.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, shard.size_bytes)
                os.pwrite(fd, shard.head, 0)
                for first, count in blueprint.stretches(name) if name in blueprint.slots else ():
                    # All pages are there from now on: a worker that runs out of room while it copies would die of SIGBUS.
                    os.posix_fallocate(fd, shard.array.offset(first), count * shard.array.slot_bytes)
            finally:
                os.close(fd)
        (slab.directory / _PRINT).write_text(blueprint.digest)
        points.reached("slab_ready")


def _seal(shard: Shard, stretches: Sequence[Sequence[int]], view: memoryview) -> Mapping[int, int]:
    """Write the checksum of each chunk behind it."""
    sums: dict[int, int] = {}
    for first, count in stretches:
        start = shard.array.offset(first)
        sealed = slots.seal(shard.array, view[start : start + count * shard.array.slot_bytes])
        sums.update(zip(range(first, first + count), sealed, strict=True))
    return sums


class SlabSource(Source):
    """A sealed slab. It may not be lent as long as this is used: `Slab.pins`."""

    trusted = True

    def __init__(self, slab: Slab) -> None:
        assert slab.part is not None
        self.path = slab.directory
        self.part = slab.part
        self._slab = slab

    def holds(self, shard: Shard, slot: int) -> bool:
        return slot in self.part.chunks.get(shard.path, ())

    def view(self, shard: Shard, slot: int, count: int) -> memoryview:
        start = shard.array.offset(slot)
        return self._slab.view(shard)[start : start + count * shard.array.slot_bytes]

    def check(self) -> None:
        # Workers remove part.json before they write: as long as it is there, what was read before is what was sealed.
        if parts.read(self._slab.directory) != self.part:
            raise DamagedCheckpoint(self.path, "it was overwritten while it was read")

    def read(self, shard: Shard, slot: int, target: memoryview) -> None:
        target[:] = self.view(shard, slot, len(target) // shard.array.slot_bytes)
