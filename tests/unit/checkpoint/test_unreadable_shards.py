"""Shards whose part.json cannot be read for a moment: they are neither deleted nor does the daemon end."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon
from mounts import needs_root, unreachable

from checkpoint import LocalShard, Snapshots, shard_manifest, steps
from checkpoint.daemon import shards
from checkpoint.protocol import Held, Inventory, Retain, SnapshotKey, StartJob, TakeInventory


@pytest.fixture
def daemon(base: Path) -> Iterator[LoneDaemon]:
    """A daemon that holds steps 1 and 2 on its disk."""
    with LoneDaemon(base, buffers=3) as daemon:
        daemon.start()
        state = [LocalShard("model/weight", (8, 64), (0, 0), torch.zeros(8, 64), (8, 64))]
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(state)
        assert snapshots.ready()
        for step in (1, 2):
            state[0].data.fill_(step)
            assert snapshots.take(step, state, {"step": step}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
            assert daemon.wait_for(Held).shard.tier == "ram"
            daemon.send(StartJob(generation=1, kind="copy", job_id=step, tier="nvme", key=SnapshotKey(step, 1), shard=0))
            assert daemon.wait_for(Held).shard.tier == "nvme"
        yield daemon


@needs_root
def test_a_shard_that_cannot_be_reached_for_a_moment_is_not_deleted(daemon: LoneDaemon) -> None:
    away = daemon.base / "away"
    away.mkdir()
    manifest = daemon.nvme / "step-00000001" / shard_manifest.NAME
    manifest.rename(away / shard_manifest.NAME)
    manifest.symlink_to(away / shard_manifest.NAME)
    with unreachable(away):
        daemon.send(Retain(generation=1, tier="nvme", steps=(1,), upto=2))
        daemon.sync(1)
    assert steps(daemon.nvme) == [1]
    daemon.send(TakeInventory(generation=1))
    assert ("nvme", 1) in [(each.tier, each.key.step) for each in daemon.wait_for(Inventory).shards]


def test_a_shard_of_an_error_of_its_disk_is_not_deleted_and_one_without_a_manifest_or_with_a_wrong_one_is(
    daemon: LoneDaemon,
) -> None:
    manifest = daemon.nvme / "step-00000001" / shard_manifest.NAME
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")  # which cannot be read at its beginning (EIO)
    (daemon.nvme / "step-00000002" / shard_manifest.NAME).write_text("{")
    (daemon.nvme / "step-00000003").mkdir()
    daemon.send(Retain(generation=1, tier="nvme", steps=(1, 2, 3), upto=3))
    daemon.sync(1)
    assert steps(daemon.nvme) == [1]


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """All that this process may have are open meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_that_nothing_is_left_to_open_with_is_not_deleted_and_ends_no_daemon(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roots = [shards.Root("nvme", daemon.nvme)]
    directories = shards._directories

    def listed(root: shards.Root) -> Iterator[tuple[Path, bool]]:
        found = list(directories(root))
        with no_descriptor_left():
            yield from found

    monkeypatch.setattr(shards, "_directories", listed)
    shards.forget(roots, lambda _: True)
    assert shards.inventory(roots) == []
    assert "raise the limit" in caplog.text
    monkeypatch.undo()
    assert [each.key.step for each in shards.inventory(roots)] == [1, 2]
