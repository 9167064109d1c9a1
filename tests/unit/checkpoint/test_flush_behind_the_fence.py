"""A flush where the fence is up already, as it is at nearly every one: a real daemon."""

from pathlib import Path

import torch
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots
from checkpoint.fence import guard, newest_generation, raise_fence
from checkpoint.protocol import Flushed, Held, SnapshotKey, StartJob


def test_a_flush_waits_for_nobody_who_publishes_where_the_fence_is_up(base: Path) -> None:
    """The lock is not asked for alone: thousands of nodes would queue for that at every durable checkpoint."""
    with LoneDaemon(base) as daemon:
        daemon.start()
        state = [LocalShard("model/weight", (8, 64), (0, 0), torch.zeros(8, 64), (8, 64))]
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(state)
        assert snapshots.ready()
        assert snapshots.take(1, state, {}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
        key = daemon.wait_for(Held).shard.key
        assert key == SnapshotKey(1, 1)
        raise_fence(daemon.durable, 1)
        with guard(daemon.durable, 1):
            daemon.send(StartJob(generation=1, kind="flush", job_id=7, tier="durable", key=key, shard=0))
            assert daemon.wait_for(Flushed).key == key
        daemon.send(StartJob(generation=2, kind="flush", job_id=8, tier="durable", key=key, shard=0))
        assert daemon.wait_for(Flushed).job_id == 8
        assert newest_generation(daemon.durable) == 2, "one that is below is raised, where the driver could not"
