"""Buffers: shared memory that workers copy their state into, laid out as a node shard of a checkpoint.

A buffer is a directory of shard files whose pages are there and stay: copying into pages that were touched before is four times
as fast as into fresh ones. A buffer is *leased* to the workers, then *sealed*: every chunk gets its checksum, `part.json` is
written, and a link `step-N` names it. A worker that writes into a buffer removes `part.json` first, so a half-written buffer
is nobody's shard.

Owns the bookkeeping of the buffers of one node.
"""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from checkpoint import points, safe_dir, shard_manifest
from checkpoint.daemon import buffer_files
from checkpoint.daemon.buffer_files import BufferFiles
from checkpoint.errors import DamagedCheckpoint
from checkpoint.naming import step_of, step_path
from checkpoint.protocol import SnapshotKey
from checkpoint.shard_manifest import ShardManifest
from checkpoint.tiers.blueprint import Blueprint
from checkpoint.tiers.lease import LAYOUT, buffer_path, layout_of


class Use(Enum):
    """What is being done with a buffer."""

    IDLE = "idle"
    CHANGING = "changing"  # a thread makes or removes its files
    LEASED = "leased"  # workers may be writing into it
    SEALING = "sealing"  # a thread computes its checksums


@dataclass(eq=False)
class Buffer:
    """One buffer.

    Attributes:
        held: the shard in it, once sealed; of a leased one, what it held before, which a worker may have begun to overwrite.
        layout: digest of the blueprint that it is laid out for; empty where it has to be made anew.
        pins: jobs that read it.

    Invariant: where `pins` is above 0, `use` is IDLE: what a job reads is neither leased nor changed.
    """

    index: int
    files: BufferFiles
    held: ShardManifest | None = None
    layout: str = ""
    use: Use = Use.IDLE
    pins: int = 0


class Buffers:
    """The buffers of one node.

    Args:
        root: where they are; what an earlier daemon left there is taken over.
        count: how many to make.
        trusted: see `checkpoint.safe_dir`; raises UnsafeDirectory where others could change what is in `root`.

    Invariants:
        Its bookkeeping belongs to the thread that made it (that of the event loop), which every method asserts. Threads that
        make or seal a buffer get its BufferFiles and the blueprint, neither of which changes, and note nothing here.
        A buffer that a thread works on is CHANGING or SEALING meanwhile, and nobody else touches it.
        A buffer whose content is needed is never leased nor made anew, and a lease is never taken back from workers that are
        alive: one of them may have begun to write without having reported it.
        After an await the state may be another: callers look again whether they still want what they wanted.
    """

    def __init__(self, root: Path, count: int, *, trusted: Path | None = None) -> None:
        self.root = root
        self._trusted = trusted
        self._owner = threading.get_ident()
        self._blueprint: Blueprint | None = None
        self._paused = False
        self._needed: Callable[[ShardManifest], bool] = lambda held: True
        safe_dir.make_private(root, trusted=trusted)
        self._buffers = [Buffer(index, BufferFiles(buffer_path(root, index))) for index in range(count)]
        self.rescan()

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._owner, "the bookkeeping of buffers belongs to the thread of the event loop"

    # -- what they hold ------------------------------------------------------------------------------------------------

    def rescan(self) -> None:
        """Find out from the disk what every buffer holds."""
        self._check_thread()
        for buffer in self._buffers:
            if buffer.use not in (Use.CHANGING, Use.SEALING):
                buffer.layout = layout_of(buffer.files.directory)
                try:
                    buffer.held = shard_manifest.read(buffer.files.directory)
                except DamagedCheckpoint:
                    buffer.held = None
        held = {buffer.held.step: buffer for buffer in self._buffers if buffer.held is not None}
        for path in self.root.glob("step-*"):
            step = step_of(path)
            if step not in held or (path.is_symlink() and path.readlink().name != held[step].files.directory.name):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        for step, buffer in held.items():
            self._link(step, buffer)

    def held(self) -> dict[int, ShardManifest]:
        """What is held, by step."""
        self._check_thread()
        return {buffer.held.step: buffer.held for buffer in self._buffers if buffer.held is not None}

    def find(self, key: SnapshotKey) -> Buffer | None:
        """The buffer that holds a snapshot."""
        self._check_thread()
        for buffer in self._buffers:
            if buffer.held is not None and (buffer.held.step, buffer.held.generation) == (key.step, key.generation):
                return buffer
        return None

    def holds(self, key: SnapshotKey) -> bool:
        """Whether a snapshot is in a buffer that is not leased: it may have been taken once more, into another one."""
        found = self.find(key)
        return found is not None and found.use is not Use.LEASED

    def retain(self, needed: Callable[[ShardManifest], bool]) -> None:
        """Which shards may not be overwritten from now on; at first none may."""
        self._check_thread()
        self._needed = needed

    def forget(self, step: int) -> None:
        """Let a step go."""
        self._check_thread()
        for buffer in self._buffers:
            if buffer.held is not None and buffer.held.step == step:
                self._unseal(buffer)
        step_path(self.root, step).unlink(missing_ok=True)

    # -- leases --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Other workers come: no buffer is leased, everything is needed, and nothing is leased until `use` was called."""
        self._check_thread()
        for buffer in self._buffers:
            if buffer.use is Use.LEASED:
                buffer.use = Use.IDLE
        self._blueprint = None
        self.rescan()
        self.retain(lambda held: True)

    def use(self, blueprint: Blueprint) -> None:
        """Lease buffers of this layout from now on."""
        self._check_thread()
        self._blueprint, self._paused = blueprint, False

    def pause(self) -> None:
        """Lease nothing until `use` is called. What is sealed just now is of the layout until now."""
        self._check_thread()
        self._paused = True

    def lease(self) -> int | None:
        """Choose a buffer for the next snapshot: an empty one, or the oldest that is not needed; None where there is none."""
        self._check_thread()
        if self._blueprint is None or self._paused:
            return None
        free = [buffer for buffer in self._buffers if self._free(buffer) and buffer.layout == self._blueprint.digest]
        if not free:
            return None
        buffer = min(free, key=lambda each: (each.held is not None, each.held.step if each.held else 0))
        buffer.use = Use.LEASED
        return buffer.index

    def give_back(self, index: int) -> None:
        """The workers are done with a buffer that is not to be sealed."""
        self._check_thread()
        buffer = self._buffers[index]
        buffer.use = Use.IDLE
        if not (buffer.files.directory / shard_manifest.NAME).exists():
            buffer.held = None

    def doubt(self, index: int) -> None:
        """A buffer could not be written to: it is not leased again before it was made anew."""
        self._check_thread()
        buffer = self._buffers[index]
        buffer.layout = ""
        with suppress(OSError):
            (buffer.files.directory / LAYOUT).unlink()

    def _free(self, buffer: Buffer) -> bool:
        needed = buffer.held is not None and self._needed(buffer.held)
        return buffer.use is Use.IDLE and buffer.pins == 0 and not needed

    # -- work on their files -------------------------------------------------------------------------------------------

    @property
    def misfits(self) -> bool:
        """Whether there are buffers of another layout: of a generation with other nodes, or broken."""
        self._check_thread()
        return self._blueprint is not None and any(buffer.layout != self._blueprint.digest for buffer in self._buffers)

    def fitting(self, blueprint: Blueprint) -> int:
        """How many are laid out for this, whatever they hold."""
        self._check_thread()
        return sum(buffer.layout == blueprint.digest for buffer in self._buffers)

    @property
    def empty(self) -> bool:
        """Whether nothing is held, and nobody works with any."""
        self._check_thread()
        return all(buffer.held is None and buffer.use is Use.IDLE and buffer.pins == 0 for buffer in self._buffers)

    @property
    def idle(self) -> bool:
        """Whether nobody works with any, nor reads one."""
        self._check_thread()
        return all(buffer.use is Use.IDLE and buffer.pins == 0 for buffer in self._buffers)

    async def make_one(self, blueprint: Blueprint) -> bool:
        """Make one buffer anew that is of another layout and holds nothing which is needed; False where there is none.

        Raises OSError where there is no room.
        """
        self._check_thread()
        buffer = next((each for each in self._buffers if self._free(each) and each.layout != blueprint.digest), None)
        if buffer is None:
            return False
        with _changing(buffer):
            try:
                await asyncio.to_thread(buffer_files.make, buffer.files.directory, blueprint, trusted=self._trusted)
            except OSError:  # what there was room for is of no use
                await asyncio.to_thread(safe_dir.remove, buffer.files.directory, trusted=self._trusted)
                raise
            buffer.layout = blueprint.digest
        return True

    async def renew(self) -> None:
        """Remove the buffers that hold nothing: somebody of the generation before may still write into them."""
        self._check_thread()
        for buffer in self._buffers:
            if buffer.held is None and self._free(buffer):
                with _changing(buffer):
                    await asyncio.to_thread(safe_dir.remove, buffer.files.directory, trusted=self._trusted)

    async def remove_empty(self) -> None:
        """Remove the buffers that hold nothing, for which there is no room, and the directory of all where it has nothing else."""
        await self.renew()
        with suppress(OSError):
            self.root.rmdir()

    async def leave(self) -> None:
        """Make a directory of its own of each shard, where other buffers are used from now on, and remove all other buffers."""
        self._check_thread()
        assert self.idle
        self._blueprint = None
        for buffer in self._buffers:
            if buffer.held is not None:
                path = step_path(self.root, buffer.held.step)
                path.unlink(missing_ok=True)
                buffer.files.directory.rename(path)
                buffer.files, buffer.held, buffer.layout = BufferFiles(buffer.files.directory), None, ""
        await self.remove_empty()

    async def seal(self, index: int, key: SnapshotKey, shard: int, shards: int, pool: Executor) -> ShardManifest:
        """Make what the workers have written into a leased buffer the shard of a snapshot.

        Raises OSError, ValueError; the buffer holds nothing then.
        """
        self._check_thread()
        assert self._blueprint is not None
        buffer = self._buffers[index]
        buffer.use, buffer.held = Use.SEALING, None
        work = partial(buffer_files.seal, buffer.files, self._blueprint, key, shard, shards, pool)
        try:
            manifest, new = await asyncio.get_running_loop().run_in_executor(None, work)
            new.replace(buffer.files.directory / shard_manifest.NAME)
            points.reached("sealed")
            for other in self._buffers:
                if other.held is not None and other.held.step == key.step:
                    self._unseal(other)  # of a past that was left
            self._link(key.step, buffer)
            buffer.held = manifest
        finally:
            buffer.use = Use.IDLE
        return manifest

    async def clear(self) -> None:
        """Give the memory back."""
        self._check_thread()
        self._blueprint = None
        for buffer in self._buffers:
            buffer.files, buffer.held, buffer.layout = BufferFiles(buffer.files.directory), None, ""
        await asyncio.to_thread(safe_dir.remove, self.root, trusted=self._trusted)

    def _unseal(self, buffer: Buffer) -> None:
        (buffer.files.directory / shard_manifest.NAME).unlink(missing_ok=True)
        buffer.held = None

    def _link(self, step: int, buffer: Buffer) -> None:
        name = buffer.files.directory.name
        for other in self.root.glob("step-*"):
            if other.is_symlink() and other.readlink().name == name and step_of(other) != step:
                other.unlink(missing_ok=True)
        path = step_path(self.root, step)
        if path.is_dir() and not path.is_symlink():  # of a past that was left, and of buffers that were left, too
            (path / shard_manifest.NAME).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
        new = self.root / f".link-{buffer.index}"
        new.unlink(missing_ok=True)
        new.symlink_to(name)
        new.replace(path)


@contextmanager
def _changing(buffer: Buffer) -> Iterator[None]:
    """While a thread changes the files of a buffer it is nobody's, and it has other BufferFiles from then on."""
    buffer.use, buffer.held, buffer.layout = Use.CHANGING, None, ""
    buffer.files = BufferFiles(buffer.files.directory)
    try:
        yield
    finally:
        buffer.use = Use.IDLE
