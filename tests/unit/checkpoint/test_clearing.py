"""What a snapshot daemon holds is deleted while it works on it: a real daemon, stopped in the middle of its work."""

import time
from collections.abc import Callable
from pathlib import Path
from select import select

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots
from checkpoint.protocol import Clear, Cleared, Held, SnapshotKey, StartJob, TierTrouble

AT_ONCE_S = 0.5


def begin(daemon: LoneDaemon) -> tuple[Snapshots, list[LocalShard]]:
    daemon.start()
    state = [LocalShard("model/weight", (8, 64), (0, 0), torch.ones(8, 64), (8, 64))]
    snapshots = Snapshots(daemon.begin(1))
    snapshots.start(state)
    return snapshots, state


def take(snapshots: Snapshots, state: list[LocalShard]) -> None:
    assert snapshots.ready()
    assert snapshots.take(1, state, {"step": 1}, frozenset(["ram"]), wait_s=PATIENCE_S).copied


def make_buffers(daemon: LoneDaemon) -> None:
    begin(daemon)


def seal(daemon: LoneDaemon) -> None:
    take(*begin(daemon))


def copy(daemon: LoneDaemon) -> None:
    take(*begin(daemon))
    daemon.wait_for(Held)
    daemon.send(StartJob(generation=1, kind="copy", job_id=7, tier="nvme", key=SnapshotKey(1, 1), shard=0))


@pytest.mark.parametrize(
    ("point", "work"),
    [("buffer_made", make_buffers), ("seal_begun", seal), ("copy_begun", copy), ("copy_durable", copy)],
    ids=["a buffer is made", "a snapshot is sealed", "a copy has begun", "a copy is about to be renamed"],
)
def test_what_is_at_work_when_all_is_deleted_makes_nothing_again(
    base: Path, point: str, work: Callable[[LoneDaemon], None]
) -> None:
    with LoneDaemon(base, pause_at=point) as daemon:
        work(daemon)
        daemon.reached()
        before = len(daemon.news)
        daemon.send(Clear(generation=1, tiers=("ram", "nvme")))
        assert daemon.process.stdout is not None
        assert not select([daemon.process.stdout], [], [], AT_ONCE_S)[0], "it is not waited for"
        daemon.go()
        daemon.wait_for(Cleared)
        assert not daemon.ram.exists() and not daemon.nvme.exists()
        assert not [news for news in daemon.news[before:] if isinstance(news, TierTrouble)]


def test_a_tier_that_hangs_does_not_keep_all_from_being_deleted(base: Path) -> None:
    with LoneDaemon(base, pause_at="copy_begun", tier_s=AT_ONCE_S) as daemon:
        copy(daemon)
        daemon.reached()  # and never goes on
        daemon.send(Clear(generation=1, tiers=("ram", "nvme")))
        daemon.wait_for(Cleared)
        assert not daemon.ram.exists() and not daemon.nvme.exists()
        assert "may stay" in daemon.log.read_text()


def test_memory_is_given_back_while_a_tier_hangs_and_the_disk_once_it_answers_though_the_agent_is_gone(base: Path) -> None:
    with LoneDaemon(base, pause_at="copy_begun", tier_s=10 * PATIENCE_S) as daemon:
        copy(daemon)
        daemon.reached()
        daemon.send(Clear(generation=1, tiers=("ram", "nvme")))
        daemon.abandon()
        deadline = time.monotonic() + PATIENCE_S
        while daemon.ram.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not daemon.ram.exists()
        daemon.go()
        assert daemon.process.wait(PATIENCE_S) == 0
        assert not daemon.ram.exists() and not daemon.nvme.exists()
