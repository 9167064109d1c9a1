"""The work of jobs: a shard is copied to a tier, fetched from another node, flushed to the durable tier, or committed there.

Runs in threads, on descriptions that do not change.
"""

from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import crc32c

from checkpoint import points
from checkpoint.daemon.shards import SPARE, Lookup, replica_root
from checkpoint.errors import CheckpointError
from checkpoint.handshake import DAEMON_DAEMON
from checkpoint.manifest import Manifest
from checkpoint.naming import step_path
from checkpoint.protocol import Replicate, StartJob
from checkpoint.shard_manifest import ShardManifest
from checkpoint.tiers import copying, joint_commit
from checkpoint.tiers.copying import Copy
from checkpoint.tiers.remote import RemoteShard


def copy(request: StartJob, lookup: Lookup, root: Path, transfer: Copy) -> tuple[ShardManifest, Path]:
    """Copy a shard to a tier of this node; what was copied, where to. Raises OSError, CheckpointError, Cancelled."""
    found = lookup.open(request.key, request.shard)
    transfer.check = found.source.check
    target = step_path(root, request.key.step)
    with closing(found.source):
        copying.to_tier(found.source, found.manifest, found.documents, target, transfer)
    return found.manifest, target


def replicate(request: Replicate, key: str, root: Path, transfer: Copy) -> tuple[ShardManifest, Path]:
    """Fetch a shard of the node whose buddy this is. Raises as `copy` does, and UnreachableCheckpoint."""
    with closing(RemoteShard(request.address, request.directory, key, transfer.cancelled, role=DAEMON_DAEMON)) as source:
        found = source.manifest
        if (found.step, found.generation, found.node) != (*_pair(request), request.shard):
            raise CheckpointError(f"{source.path} holds step {found.step} of generation {found.generation}")
        target = step_path(replica_root(root, found.node), found.step)
        points.reached("replica_begun")
        spare = target.with_name(SPARE)
        copying.to_tier(source, found, _fetched(source, spare), target, transfer, spare=spare)
        points.reached("replica_held")
    return found, target


@dataclass(frozen=True)
class FlushedShard:
    """What a commit must know of a shard that was flushed; its buffer is not kept for it."""

    manifest: ShardManifest
    documents: dict[str, bytes]


def flush(request: StartJob, lookup: Lookup, root: Path, transfer: Copy) -> FlushedShard:
    """Write a shard into the checkpoint on the durable tier that all nodes write together. Raises as `copy` does."""
    found = lookup.open(request.key, request.shard)
    transfer.check = found.source.check
    with closing(found.source):
        copying.flush(found.source, found.manifest, found.documents, root, request.generation, transfer)
    return FlushedShard(found.manifest, found.documents)


def commit(
    request: StartJob,
    lookup: Lookup,
    flushed: FlushedShard | None,
    root: Path,
    keep_last: int,
    keep_every: int | None,
    transfer: Copy,
) -> Manifest:
    """Commit what all nodes have flushed.

    Args:
        flushed: the shard as this node has flushed it; None where a daemon before this one did.

    Raises as `copy` does.
    """
    if flushed is None:
        found = lookup.open(request.key, request.shard)
        found.source.close()
        flushed = FlushedShard(found.manifest, found.documents)
    return joint_commit.finish(
        flushed.manifest,
        flushed.documents,
        root,
        request.generation,
        keep_last=keep_last,
        keep_every=keep_every,
        progress=lambda: transfer.moved(0),
        cancelled=transfer.cancelled.is_set,
    )


def _pair(request: Replicate) -> tuple[int, int]:
    return request.key.step, request.key.generation


def _fetched(source: RemoteShard, spare: Path) -> dict[str, bytes]:
    """The metadata files of a shard; what an older replica has of them already need not travel."""
    found = {}
    for name, entry in source.manifest.files.items():
        text = b""
        with suppress(OSError):
            text = (spare / name).read_bytes()
        if (len(text), crc32c.crc32c(text)) != (entry.size_bytes, entry.crc32c):
            text = source.document(name)
        found[name] = text
    return found
