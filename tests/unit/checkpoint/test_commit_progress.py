"""A commit reads, makes durable and deletes thousands of small files: each one is progress. Real daemons."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots, save, shard_manifest, step_path, steps, verify
from checkpoint.protocol import Cancel, Committed, Flushed, Held, JobFailed, JobKind, SnapshotKey, StartJob, TierTrouble
from checkpoint.tiers import joint_commit
from checkpoint.tiers.copying import SHARES

NODES = 16
HANG_S = 3.0
READ_S = 0.3  # of each share; of all together longer than HANG_S


def state() -> list[LocalShard]:
    return [LocalShard("model/weight", (8, 64), (0, 0), torch.zeros(8, 64), (8, 64))]


def flushed(daemon: LoneDaemon, step: int, nodes: int = 1) -> Callable[[JobKind], None]:
    """The first of so many nodes has flushed all that a checkpoint has; what starts another job of it."""
    daemon.start()
    snapshots = Snapshots(daemon.begin(1, nodes=nodes))
    snapshots.start(state())
    assert snapshots.ready()
    assert snapshots.take(step, state(), {}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
    assert daemon.wait_for(Held).shard.key == SnapshotKey(step, 1)

    def start(kind: JobKind) -> None:
        daemon.send(StartJob(generation=1, kind=kind, job_id=7, tier="durable", key=SnapshotKey(step, 1), shard=0))

    start("flush")
    assert isinstance(daemon.wait_for(Flushed | JobFailed), Flushed)  # type: ignore[arg-type]
    return start


def test_a_commit_that_gets_on_from_share_to_share_is_no_trouble_however_long_it_takes(base: Path) -> None:
    with LoneDaemon(base, hang_s=HANG_S) as daemon:
        start = flushed(daemon, 1, NODES)
        share = daemon.durable / f"step-00000001.g1.tmp/{SHARES}/node-0.g1.json"
        own = shard_manifest.decode(share, share.read_bytes())
        shares = {share: own}
        for node in range(1, NODES):  # who have written nothing, for the first one has all
            shares[share.with_name(f"node-{node}.g1.json")] = replace(own, node=node, size_bytes=0, chunks={})
        share.unlink()
        for path in shares:
            os.mkfifo(path)
        start("commit")
        for path, each in shares.items():
            with path.open("wb") as file:  # once the daemon reads it
                time.sleep(READ_S)  # as slow as the file system is
                file.write(shard_manifest.encode(each))
        assert daemon.wait_for(Committed).key == SnapshotKey(1, 1)
        assert not [news for news in daemon.news if isinstance(news, TierTrouble)]
        verify(daemon.durable / "step-00000001")


def test_each_file_that_a_commit_makes_durable_or_deletes_is_progress(base: Path) -> None:
    with LoneDaemon(base) as daemon:
        flushed(daemon, 2)
        held = shard_manifest.read(daemon.held_path(2))
        documents = shard_manifest.documents(daemon.held_path(2), held)
    save(daemon.durable, 1, state(), {"step": 1}, generation=1)
    gone = [path for path in step_path(daemon.durable, 1).rglob("*") if path.is_file()]
    told: list[None] = []
    contents = joint_commit.finish(held, documents, daemon.durable, 1, keep_last=1, progress=lambda: told.append(None))
    assert steps(daemon.durable) == [2]
    assert len(told) >= held.nodes + 2 * len(contents.files) + len(gone), "each is read or looked at, and made durable"


def test_a_commit_that_is_called_off_too_late_is_told_and_deletes_nothing_older(base: Path) -> None:
    """The run may be about to go back to the oldest one that there is."""
    with LoneDaemon(base, pause_at="finish_begun") as daemon:
        for step in (1, 2, 3):  # as many as are kept
            save(daemon.durable, step, state(), {"step": step}, generation=1)
        start = flushed(daemon, 4)
        start("commit")
        daemon.reached()
        daemon.send(Cancel(generation=1, job_id=7))
        daemon.sync(1)
        daemon.go()
        end = daemon.wait_for(Committed | JobFailed)  # type: ignore[arg-type]
        assert isinstance(end, Committed), end
        assert steps(daemon.durable) == [1, 2, 3, 4]
        verify(daemon.durable / "step-00000004")
