"""The only worker of a snapshot daemon by itself, and what the daemon is asked to do."""

from typing import Any

import torch
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots
from checkpoint.protocol import Held, SnapshotKey, StartJob


def local_shards(step: int, rows: int = 8) -> list[LocalShard]:
    """The state of the only rank after a step."""
    return [LocalShard("model/weight", (rows, 64), (0, 0), torch.full((rows, 64), float(step)), (rows, 64))]


def worker(daemon: LoneDaemon, generation: int, rows: int = 8) -> Snapshots:
    """A worker that has announced its layout, and for which there are buffers."""
    snapshots = Snapshots(daemon.begin(generation))
    snapshots.start(local_shards(0, rows))
    assert snapshots.ready()
    return snapshots


def take(daemon: LoneDaemon, snapshots: Snapshots, step: int) -> Held:
    """A snapshot, sealed."""
    assert snapshots.take(step, local_shards(step), {"step": step}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
    return daemon.wait_for(Held)


def job(kind: Any, tier: str, step: int, job_id: int = 7) -> StartJob:
    return StartJob(generation=1, kind=kind, job_id=job_id, tier=tier, key=SnapshotKey(step, 1), shard=0)
