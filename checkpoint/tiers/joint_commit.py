"""The commit of a checkpoint that all nodes have flushed, by one of them: of their shares it makes the manifest, and publishes it.

Owns what is read of the shares and what is deleted by that. Thousands of small files on a tier that all nodes use: of each one it
is said that it is done.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from checkpoint import commit, manifest, points, shard_manifest
from checkpoint.errors import CheckpointError
from checkpoint.fence import fsync_directory, guard
from checkpoint.manifest import FileEntry, Manifest
from checkpoint.naming import aside, stale, step_path, temporary_path
from checkpoint.pruning import prune_behind, remove
from checkpoint.shard_manifest import ShardManifest
from checkpoint.tiers.copying import SHARES, make_parents, root_metadata, shards_of


def finish(
    node_shard: ShardManifest,
    documents: Mapping[str, bytes],
    root: Path,
    attempt: int,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    progress: Callable[[], None] = lambda: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Manifest:
    """Commit what all nodes have flushed; one of them does. After an OSError it can be called again.

    A checkpoint of the same step that is of another generation's snapshot was passed over, or could not be read for a while: the
    one that is there is not what the run goes on from, and is set aside.

    Args:
        node_shard: of the node that commits.
        progress: called for each file that is read, made durable or deleted, by several threads.
        cancelled: whether the commit is not wanted any more. It is made all the same, and nothing older is deleted for it: that may
            be what the run goes back to.

    Raises OSError, StaleGeneration, CheckpointError where a share is missing.
    """
    target = step_path(root, node_shard.step)
    temporary = temporary_path(root, node_shard.step, attempt)
    if not temporary.exists() and target.exists():
        there = manifest.read(target)
        if there.generation == node_shard.generation:  # it was committed by one that died before it could say so
            fsync_directory(root)
            return there
    with guard(root, attempt):
        pass
    points.reached("finish_begun")
    if not (temporary / SHARES).exists() and (temporary / manifest.NAME).exists():
        contents = manifest.read(temporary, step=node_shard.step)  # which is durable: it could only not be published
    else:
        contents = Manifest(node_shard.step, node_shard.generation, _gather(node_shard, documents, temporary, progress))

    def described() -> None:
        _remove_others(temporary, {*contents.files, manifest.NAME}, progress)

    commit.commit(root, attempt, contents, of_others=False, described=described, progress=progress)
    for leftover in stale(root, attempt, node_shard.step):
        remove(leftover, progress)
    if keep_last is not None and not cancelled():
        prune_behind(root, node_shard.step, keep_last, keep_every, attempt, progress)
    return contents


def _gather(
    node_shard: ShardManifest, documents: Mapping[str, bytes], temporary: Path, progress: Callable[[], None]
) -> Mapping[str, FileEntry]:
    """What the manifest says of each file, from all nodes' shares. Raises CheckpointError where a share or a file is not there."""
    shares = []
    for node in range(node_shard.nodes):
        shares.append(_share(temporary, node, node_shard))
        progress()
    for name, text in documents.items():
        make_parents(temporary / name, temporary)
        (temporary / name).write_bytes(text)
        progress()
    shards = shards_of(root_metadata(documents, temporary), temporary)
    try:
        files = commit.entries(documents, shards.values(), shard_manifest.merged(shares))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    for name, shard in shards.items():
        size = (temporary / name).stat().st_size
        if size != shard.size_bytes:
            raise CheckpointError(f"{temporary / name} has {size} bytes instead of {shard.size_bytes}")
        progress()
    return files


def _share(temporary: Path, node: int, node_shard: ShardManifest) -> ShardManifest:
    path = temporary / SHARES / f"node-{node}.g{node_shard.generation}.json"
    try:
        return shard_manifest.decode(temporary, path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: that node has not flushed its share") from None


def _remove_others(temporary: Path, names: set[str], progress: Callable[[], None]) -> None:
    """Delete what is none of these files: shares, and what an attempt before has left that had other arrays."""
    shares = temporary / SHARES
    if shares.exists():
        shares.rename(aside(shares, "over"))  # at once: half of them would be none
    points.reached("finish_shares_gone")
    for directory, inside, files in os.walk(temporary, topdown=False):
        for name in files:
            path = Path(directory, name)
            if str(path.relative_to(temporary)) not in names:
                path.unlink()
                progress()
        for name in inside:
            with suppress(OSError):  # where something is left in it, it belongs to the checkpoint
                Path(directory, name).rmdir()
