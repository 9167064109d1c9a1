"""Saving: all ranks write one checkpoint together.

Owns the course of a save, from the ranks' agreement on a layout to the commit. A failure on one rank fails the save on all of
them, and leaves what was there as it was.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from checkpoint import commit, manifest, metadata, plan, writing
from checkpoint.agreement import Outcome, Ranks, results
from checkpoint.block import Block
from checkpoint.errors import CheckpointError, naming
from checkpoint.layout import ArrayInfo, Shard
from checkpoint.local_shard import LocalShard
from checkpoint.manifest import Manifest
from checkpoint.naming import step_path, temporary_path
from checkpoint.plan import ShardSpec
from checkpoint.pruning import prune_behind
from checkpoint.state import JSON
from checkpoint.writing import Checksums, Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """What a save has done, the same on all ranks.

    Attributes:
        path: of the checkpoint.
        step: that it is of.
        bytes: of all its files.
        files: how many there are.
        write_s: seconds from the call to the commit.
        already_there: a sound checkpoint of this step was there, and was left as it is.
    """

    path: Path
    step: int
    bytes: int
    files: int
    write_s: float
    already_there: bool


@dataclass(frozen=True)
class Layout:
    """What depends on the local shards' shapes alone, and is kept from save to save."""

    arrays: tuple[ArrayInfo, ...]

    @cached_property
    def ordinals(self) -> dict[str, int]:
        return {info.name: number for number, info in enumerate(self.arrays)}

    @cached_property
    def shards(self) -> list[Shard]:
        return [shard for info in self.arrays for shard in info.shards.values()]

    @cached_property
    def documents(self) -> dict[str, bytes]:
        return metadata.documents(self.arrays)


_layouts: dict[bytes, tuple[bytes, Layout]] = {}  # own shard specs: everyone's shard specs, and what came of them
_LAYOUTS_KEPT = 4


def save(
    root: Path,
    step: int,
    local_shards: Sequence[LocalShard],
    state: Mapping[str, JSON],
    *,
    generation: int,
    group: dist.ProcessGroup | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Saved:
    """Write and commit the checkpoint of a step. Collective: every rank of the group calls it, and returns or raises alike.

    Args:
        root: where checkpoints are, on a file system that all ranks share.
        step: 0 to 99999999.
        local_shards: what this rank holds; over all ranks they fill every array exactly once, replicas aside.
        state: whatever else is needed to go on; rank 0's is written.
        generation: of the attempt that saves; an old one cannot commit.
        group: one that carries objects (gloo does); None for the default group, or for this process alone where
            torch.distributed is not in use.
        keep_last: delete all but so many of the newest checkpoints up to this step, this one included; None keeps all.
        keep_every: with `keep_last`, keep the multiples of so many steps for good.

    Raises CheckpointError naming the ranks that failed, and why; StaleGeneration where a newer generation has taken over.
    What was there before is untouched then.
    """
    began = time.monotonic()
    ranks = Ranks(group)
    try:
        layout = agree(ranks, [spec_of(local_shard) for local_shard in local_shards])
        documents: dict[str, bytes] = {}  # rank 0's
        already = ranks.first(lambda: _open(root, step, generation, layout, state, documents))
        if already is not None:
            return _saved(root, began, already, already_there=True)
        outcomes = ranks.to_first(Outcome(ranks.rank, lambda: _write(root, step, generation, layout, local_shards)))
        contents, fresh = ranks.first(lambda: _publish(root, step, generation, layout, documents, results(outcomes)))
    except CheckpointError as error:
        if ranks.rank == 0:
            _discard(root, step, generation)
        if type(error) is not CheckpointError:
            raise
        raise CheckpointError(f"step {step} could not be saved in {root}: {error}") from None
    if ranks.rank == 0 and keep_last is not None:
        prune_behind(root, step, keep_last, keep_every, generation)
    return _saved(root, began, contents, already_there=not fresh)


def save_one_by_one(
    root: Path, step: int, shapes: Sequence[LocalShard], local_shards: Iterable[LocalShard], state: Mapping[str, JSON]
) -> Saved:
    """Write and commit a checkpoint as its tensors come, by this process alone: each is on the disk before the next is asked for.

    Args:
        shapes: all local shards, in any order, with tensors on the meta device; they fill every array.
        local_shards: the same with their data.

    Raises CheckpointError; OSError, which names the checkpoint where writing failed; ValueError where one of `shapes` does not
    come; and whatever `local_shards` raises. What was there before is untouched then.
    """
    began, path = time.monotonic(), step_path(root, step)
    layout, documents, generation = Layout(plan.plan([[spec_of(each) for each in shapes]])), dict[str, bytes](), 0
    try:
        with naming(path):
            already = _open(root, step, generation, layout, state, documents)
        if already is not None:
            return _saved(root, began, already, already_there=True)
        shares: list[Checksums] = []
        for local_shard in local_shards:
            with naming(path):
                shares.append(_write(root, step, generation, layout, [local_shard]))
            del local_shard  # its memory is free before the next one is made
        with naming(path):
            contents, fresh = _publish(root, step, generation, layout, documents, shares)
    except BaseException:
        _discard(root, step, generation)
        raise
    return _saved(root, began, contents, already_there=not fresh)


def spec_of(local_shard: LocalShard) -> ShardSpec:
    """A local shard without its data."""
    each = local_shard
    where = (each.array, each.dtype, each.shape, each.offset, each.extent, each.unit)
    return ShardSpec(*where, each.replica, each.replicas, each.copy, each.copies)


def agree(ranks: Ranks, specs: list[ShardSpec]) -> Layout:
    """The layout of what all ranks hold. Nothing but a digest travels when it is that of an earlier save."""
    own = hashlib.sha256(repr(specs).encode()).digest()
    known = _layouts.get(own)
    shared = ranks.all((own, None if known is None else known[0]))
    together = hashlib.sha256(b"".join(each for each, _ in shared)).digest()
    if known is not None and all(earlier == together for _, earlier in shared):
        return known[1]
    everyone = ranks.to_first(specs)
    layout = Layout(ranks.first(lambda: plan.plan(everyone)))
    _layouts[own] = (together, layout)
    if len(_layouts) > _LAYOUTS_KEPT:
        del _layouts[next(iter(_layouts))]
    return layout


def _open(
    root: Path, step: int, generation: int, layout: Layout, state: Mapping[str, JSON], documents: dict[str, bytes]
) -> Manifest | None:
    present = commit.good(root, step)
    if present is None:
        documents.update(layout.documents)
        root_document = documents[metadata.NAME]
        documents[metadata.NAME] = metadata.with_attributes(root_document, step, generation, state)
        commit.open_temporary(root, step, generation, layout.shards, documents)
    return present


def _write(root: Path, step: int, generation: int, layout: Layout, local_shards: Sequence[LocalShard]) -> Checksums:
    tasks = []
    for local_shard in local_shards:
        if local_shard.data.numel():
            ordinal = layout.ordinals[local_shard.array]
            info = layout.arrays[ordinal]
            block = Block(local_shard, info)
            tasks += [Task(chunk_run, block) for chunk_run in plan.chunks_to_write(info, ordinal, spec_of(local_shard))]
    pinned = any(local_shard.data.is_cuda for local_shard in local_shards)
    return writing.write(temporary_path(root, step, generation), tasks, pinned=pinned)


def _publish(
    root: Path, step: int, generation: int, layout: Layout, documents: Mapping[str, bytes], shares: list[Checksums]
) -> tuple[Manifest, bool]:
    files = commit.entries(documents, layout.shards, writing.merged(shares))
    contents = Manifest(step, generation, files)
    return contents, commit.commit(root, generation, contents)


def _saved(root: Path, began: float, contents: Manifest, *, already_there: bool) -> Saved:
    size = contents.size_bytes + len(manifest.encode(contents))
    seconds = time.monotonic() - began
    return Saved(step_path(root, contents.step), contents.step, size, len(contents.files) + 1, seconds, already_there)


def _discard(root: Path, step: int, generation: int) -> None:
    try:
        shutil.rmtree(temporary_path(root, step, generation))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _log.warning("an unfinished checkpoint could not be removed: %s", error)
