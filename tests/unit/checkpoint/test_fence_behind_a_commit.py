"""A fence that is raised in the moment between a commit and the deletion of older checkpoints: a real daemon."""

from pathlib import Path

import torch
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots, save, steps, verify
from checkpoint.fence import raise_fence
from checkpoint.protocol import Committed, Flushed, Held, JobFailed, JobKind, SnapshotKey, StartJob


def test_a_commit_is_told_as_done_although_the_fence_forbids_to_delete_older_checkpoints_behind_it(base: Path) -> None:
    with LoneDaemon(base, pause_at="published") as daemon:
        daemon.start()
        state = [LocalShard("model/weight", (8, 64), (0, 0), torch.zeros(8, 64), (8, 64))]
        for step in (1, 2, 3):  # as many as are kept
            save(daemon.durable, step, state, {"step": step}, generation=1)
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(state)
        assert snapshots.ready()
        assert snapshots.take(4, state, {"step": 4}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
        assert daemon.wait_for(Held).shard.key == SnapshotKey(4, 1)

        def start(kind: JobKind) -> None:
            daemon.send(StartJob(generation=1, kind=kind, job_id=7, tier="durable", key=SnapshotKey(4, 1), shard=0))

        start("flush")
        assert daemon.wait_for(Flushed).key == SnapshotKey(4, 1)
        start("commit")
        daemon.reached()
        raise_fence(daemon.durable, 2)
        daemon.go()
        end = daemon.wait_for(Committed | JobFailed)  # type: ignore[arg-type]
        assert isinstance(end, Committed), end
        assert steps(daemon.durable) == [1, 2, 3, 4]  # the older ones are the next generation's
        verify(daemon.durable / "step-00000004")
