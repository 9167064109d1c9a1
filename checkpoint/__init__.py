"""checkpoint: sharded, verified checkpoints in Zarr v3, usable without the rest of this project.

A checkpoint is a directory `step-<8 digits>` that any Zarr client opens: every parameter and every optimizer state is one
global array, whatever the layout that wrote it. All ranks write at once, each its own slots of the shard files; a manifest
names every file with its size and checksum; one rename commits. It is there whole or not at all, and a byte that has
changed is found.

    from pathlib import Path
    from checkpoint import load, newest_good, local_shard_of, save

    root = Path("checkpoints")
    same = {"replica": rank, "replicas": world_size}       # plain tensors, which all ranks hold alike; DTensors know their mesh
    local_shards = [local_shard_of(f"model/{name}", tensor, **same) for name, tensor in model.state_dict().items()]

    save(root, step, local_shards, {"samples": 6400}, generation=0, keep_last=3)     # on all ranks

    path = newest_good(root)                                                   # on all ranks
    if path is not None:
        state = load(path, local_shards)                                             # fills the tensors in place

A *local shard* is what one rank holds of a global array. `local_shard_of` makes one from a plain tensor or a DTensor, on any mesh,
with uneven or empty shards; `LocalShard` can be filled in by hand for anything else. Whatever the local shards were when a
checkpoint was written, it loads into any others that lie in the same global arrays: more ranks, fewer, or cut along another
dimension. Of the ranks that hold the same block each writes a share.

A *generation* is the number of the attempt that writes: raise it with each restart (`checkpoint.fence.raise_fence`), and
what is left of older attempts can no longer publish anything and is cleared away. A program that nobody restarts may stay
at 0.

`save` and `newest_good` are collective over a `torch.distributed` group that carries objects (gloo does). When one rank
fails (no room, say), all of them raise the same CheckpointError, nothing new is there, and nothing old is gone. `verify`
reads every byte of a checkpoint; `load` reads only the chunks that it needs and checks each.

    >>> import zarr
    >>> zarr.open_group("checkpoints/step-00000400", mode="r")["model/embedding.weight"][:2]     # nothing of ours needed

`torch.distributed.checkpoint` reads and writes the same checkpoints through `ZarrReader` and `ZarrWriter`.

The bytes are described in docs/checkpoint-format.md. Importing this package imports neither torch nor Zarr.
"""

import importlib
from typing import TYPE_CHECKING, Any

from checkpoint.errors import (
    CheckpointError,
    CheckpointMismatch,
    DamagedCheckpoint,
    NoReachableCheckpoint,
    NoUsableCheckpoint,
    StaleGeneration,
)
from checkpoint.naming import step_path, steps

if TYPE_CHECKING:
    from checkpoint.candidates import Candidate, Holding
    from checkpoint.dcp import ZarrReader, ZarrWriter
    from checkpoint.layout import ArrayInfo
    from checkpoint.loading import load, read_state
    from checkpoint.local_shard import LocalShard, local_shard_of
    from checkpoint.newest import newest_good
    from checkpoint.pruning import prune
    from checkpoint.restoring import Restored, restore
    from checkpoint.saving import Saved, save, save_one_by_one
    from checkpoint.tiers.cadence import Clock, Every, mean_time_between_failures
    from checkpoint.tiers.snapshots import SnapshotResult, Snapshots
    from checkpoint.verification import verify

__all__ = [
    "ArrayInfo",
    "Candidate",
    "CheckpointError",
    "CheckpointMismatch",
    "Clock",
    "DamagedCheckpoint",
    "Every",
    "Holding",
    "LocalShard",
    "NoReachableCheckpoint",
    "NoUsableCheckpoint",
    "Restored",
    "Saved",
    "SnapshotResult",
    "Snapshots",
    "StaleGeneration",
    "ZarrReader",
    "ZarrWriter",
    "load",
    "local_shard_of",
    "mean_time_between_failures",
    "newest_good",
    "prune",
    "read_state",
    "restore",
    "save",
    "save_one_by_one",
    "step_path",
    "steps",
    "verify",
]

# What needs torch or NumPy is imported when it is asked for.
_LAZY = {
    "ArrayInfo": "checkpoint.layout",
    "Candidate": "checkpoint.candidates",
    "Clock": "checkpoint.tiers.cadence",
    "Every": "checkpoint.tiers.cadence",
    "Holding": "checkpoint.candidates",
    "LocalShard": "checkpoint.local_shard",
    "Restored": "checkpoint.restoring",
    "Saved": "checkpoint.saving",
    "SnapshotResult": "checkpoint.tiers.snapshots",
    "Snapshots": "checkpoint.tiers.snapshots",
    "ZarrReader": "checkpoint.dcp",
    "ZarrWriter": "checkpoint.dcp",
    "load": "checkpoint.loading",
    "mean_time_between_failures": "checkpoint.tiers.cadence",
    "newest_good": "checkpoint.newest",
    "local_shard_of": "checkpoint.local_shard",
    "prune": "checkpoint.pruning",
    "read_state": "checkpoint.loading",
    "restore": "checkpoint.restoring",
    "save": "checkpoint.saving",
    "save_one_by_one": "checkpoint.saving",
    "verify": "checkpoint.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
