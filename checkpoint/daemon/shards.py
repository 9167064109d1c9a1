"""Node shards in directories: what lies where on the tiers of a node, finding one, and forgetting what is not needed.

Runs in threads; knows no bookkeeping.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from checkpoint import points, safe_dir, shard_manifest
from checkpoint.daemon.buffer_files import BufferSource
from checkpoint.errors import CheckpointError, DamagedCheckpoint
from checkpoint.naming import UNFINISHED, step_path, steps
from checkpoint.protocol import NodeShard, SnapshotKey
from checkpoint.shard_manifest import ShardManifest
from checkpoint.source import DirectorySource, Source

log = logging.getLogger(__name__)

SPARE = "spare"
"""Directory of a replica that is not needed any more; the next one overwrites its files."""


class Superseded(CheckpointError):
    """The buffer that held a shard is leased for a newer snapshot."""


class Root(NamedTuple):
    """A directory of this node that holds shards. What others could change is passed over: nothing is read or removed there.

    Attributes:
        trusted: see `checkpoint.safe_dir`.
    """

    tier: str
    path: Path
    trusted: Path | None = None

    @property
    def safe(self) -> bool:
        return safe_dir.is_safe(self.path, trusted=self.trusted)


@dataclass(frozen=True)
class OpenShard:
    """A shard that is being read.

    Attributes:
        documents: its metadata files.
    """

    source: Source
    manifest: ShardManifest
    documents: dict[str, bytes]


@dataclass(frozen=True)
class Lookup:
    """Where a job finds the shards of this node; fixed when the job is accepted.

    Attributes:
        node: this one, for messages.
        buffer: the buffer that holds the snapshot, pinned for the job.
        leased: the buffer that holds it is leased, and may be overwritten at any moment.
        roots: of the node's tiers.
    """

    node: int
    buffer: BufferSource | None
    leased: bool
    roots: tuple[Root, ...]

    def open(self, key: SnapshotKey, shard: int) -> OpenShard:
        """A shard, the node's own or a replica, from the nearest tier that has it.

        Raises Superseded, CheckpointError where it is not here.
        """
        buffer = self.buffer
        if buffer is not None and _is(buffer.manifest, key, shard):
            return OpenShard(buffer, buffer.manifest, shard_manifest.documents(buffer.path, buffer.manifest))
        for root in (each.path for each in self.roots if each.safe):
            for path in (step_path(root, key.step), step_path(replica_root(root, shard), key.step)):
                if path.is_symlink():
                    continue  # a buffer, which is leased or holds something else
                with suppress(DamagedCheckpoint):
                    found = shard_manifest.read(path)
                    if _is(found, key, shard):
                        return OpenShard(DirectorySource(path, chunks=found.chunks), found, shard_manifest.documents(path, found))
        if self.leased:
            raise Superseded(f"the buffer of step {key.step} is leased for a newer snapshot")
        raise CheckpointError(f"node {self.node} does not hold shard {shard} of step {key.step}")


def _is(manifest: ShardManifest, key: SnapshotKey, shard: int) -> bool:
    return (manifest.step, manifest.generation, manifest.node) == (key.step, key.generation, shard)


def replica_root(root: Path, shard: int) -> Path:
    """Where replicas of a shard lie on a tier."""
    return root / f"replica-{shard}"


def node_shard(tier: str, path: Path, manifest: ShardManifest, *, replica: bool = False) -> NodeShard:
    """What is reported of a shard."""
    return NodeShard(
        tier=tier,
        directory=str(path),
        key=SnapshotKey(manifest.step, manifest.generation),
        shard=manifest.node,
        shards=manifest.nodes,
        size_bytes=manifest.size_bytes,
        replica=replica,
    )


def inventory(roots: Iterable[Root]) -> list[NodeShard]:
    """All shards in directories of their own below the roots of tiers."""
    found = []
    for root in roots:
        for path, replica in _directories(root):
            with _os_errors_logged(path), suppress(DamagedCheckpoint):
                found.append(node_shard(root.tier, path, shard_manifest.read(path), replica=replica))
    return found


def sweep(roots: Iterable[Root]) -> None:
    """Delete what a daemon that died has left half copied. No job may run."""
    for root in (each for each in roots if each.safe):
        with _os_errors_logged(root.path):
            for directory in (root.path, *root.path.glob("replica-*")):
                for path in directory.glob(f"step-{'[0-9]' * 8}{UNFINISHED}"):
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _os_errors_logged(path: Path) -> Iterator[None]:
    """A file system that is read-only or broken is a tier's trouble, of which its jobs tell, and no defect."""
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", path, error.strerror)
    except CheckpointError as error:  # this process has no descriptor left to read it with
        log.warning("%s", error)


def forget(roots: Sequence[Root], needed: Callable[[ShardManifest], bool]) -> None:
    """Delete the shards that are not needed, replicas too; buffers are overwritten instead. What cannot be read stays."""
    for root in roots:
        for path, replica in _directories(root):
            with _os_errors_logged(path):
                found = shard_manifest.find(path)
                if found is None or not needed(found):
                    _delete(path, replica)


def _delete(path: Path, replica: bool) -> None:
    (path / shard_manifest.NAME).unlink(missing_ok=True)  # from here on it is nobody's shard
    points.reached("shard_forgotten")
    spare = path.with_name(SPARE)
    if replica and not spare.exists():
        with suppress(OSError):
            path.rename(spare)  # the next replica finds its files there
            return
    shutil.rmtree(path, ignore_errors=True)


def _directories(base: Root) -> Iterator[tuple[Path, bool]]:
    """Directories of steps, and whether they are replicas; the links to buffers are not among them."""
    if not base.safe:
        return
    root = base.path
    directories, found = [root], list[tuple[Path, int]]()
    with _os_errors_logged(root):
        directories += root.glob("replica-*")
    for directory in directories:
        with _os_errors_logged(directory):
            found += [(directory, step) for step in steps(directory)]
    for directory, step in found:
        path = step_path(directory, step)
        if not _is_link(path):
            yield path, directory != root


def _is_link(path: Path) -> bool:
    """Whether it is a link; one that cannot be looked at is none, and whoever reads it is told why."""
    return os.path.islink(path)  # noqa: PTH114 (it raises)
