"""A tier of a node whose file system is unmounted in the middle of a job: a real daemon and a real mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon
from mounts import hanging, needs_root

from checkpoint import LocalShard, Snapshots
from checkpoint.daemon.mounts import Mounts
from checkpoint.protocol import Held, Inventory, NoRoom, SnapshotKey, StartJob, TakeInventory, TierTrouble, TierWell

pytestmark = needs_root


def mount(point: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", point], check=True)


def unmount(point: Path) -> None:
    subprocess.run(["umount", "--lazy", point], check=True)


@contextmanager
def mounted(point: Path) -> Iterator[Path]:
    """A file system, which the test may have unmounted by the end."""
    point.mkdir()
    mount(point)
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)


def state(value: int) -> list[LocalShard]:
    return [LocalShard("model/weight", (8, 64), (0, 0), torch.full((8, 64), float(value)), (8, 64))]


def started(daemon: LoneDaemon) -> Snapshots:
    daemon.start()
    snapshots = Snapshots(daemon.begin(1))
    snapshots.start(state(0))
    return snapshots


def copy(daemon: LoneDaemon, snapshots: Snapshots, step: int) -> None:
    """Have a snapshot taken, and copied to the disk."""
    assert snapshots.take(step, state(step), {"step": step}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
    daemon.wait_for(Held)
    daemon.send(StartJob(generation=1, kind="copy", job_id=step, tier="nvme", key=SnapshotKey(step, 1), shard=0))


def test_nothing_is_written_below_the_mount_point_of_a_tier_that_is_unmounted_until_it_is_back(base: Path) -> None:
    with mounted(base / "disk") as disk, LoneDaemon(base) as daemon:
        daemon.nvme = disk / "resilient-0" / "cache"
        snapshots = started(daemon)
        copy(daemon, snapshots, 1)
        assert daemon.wait_for(Held).shard.tier == "nvme"
        unmount(disk)
        copy(daemon, snapshots, 2)
        told = daemon.wait_for(TierTrouble)
        assert (told.tier, told.detail) == (
            "nvme",
            f"the file system that was mounted on {disk} when the job began is not mounted any more: {daemon.nvme}",
        )
        assert list(disk.iterdir()) == []
        mount(disk)
        daemon.wait_for(TierWell)
        assert daemon.wait_for(Held).shard.key.step == 2


def test_a_tier_that_is_a_link_to_nothing_has_failed_until_something_is_there(base: Path) -> None:
    (base / "link").symlink_to(base / "away")
    with LoneDaemon(base) as daemon:
        daemon.nvme = base / "link" / "cache"
        copy(daemon, started(daemon), 1)
        why = f"it is a symbolic link to {base}/away, which is not there; is its file system mounted?: {base}/link"
        assert daemon.wait_for(TierTrouble).detail == why
        (base / "away").mkdir()
        assert daemon.wait_for(Held).shard.tier == "nvme"


def test_a_tier_that_answers_with_an_error_has_failed_until_it_does_not_and_keeps_no_daemon_from_starting(base: Path) -> None:
    link = base / "disk"
    link.symlink_to("x" * 300)  # whatever is below it: ENAMETOOLONG
    with LoneDaemon(base) as daemon:
        daemon.nvme = link / "cache"
        copy(daemon, started(daemon), 1)
        assert daemon.wait_for(TierTrouble).detail == f"File name too long: {daemon.nvme}"
        link.unlink()
        link.mkdir()
        assert daemon.wait_for(Held).shard.tier == "nvme"


def test_a_tier_that_does_not_answer_keeps_no_daemon_from_starting(base: Path) -> None:
    (disk := base / "disk").mkdir()
    with hanging(disk):
        with below(base, disk) as daemon:
            snapshots = started(daemon)
            assert snapshots.take(1, state(1), {"step": 1}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
            assert daemon.wait_for(Held).shard.tier == "ram"
        with below(base, disk) as next_one:
            next_one.start()
            next_one.send(TakeInventory(generation=1))
            assert [(shard.tier, shard.key.step) for shard in next_one.wait_for(Inventory).shards] == [("ram", 1)]


def below(base: Path, disk: Path) -> LoneDaemon:
    """A daemon of which all but the memory lies on that disk."""
    daemon = LoneDaemon(base, tier_s=1.0)
    daemon.nvme, daemon.durable = disk / "cache", disk / "durable"
    daemon.places += [daemon.nvme / "slabs", daemon.durable / ".slabs" / "node0"]
    return daemon


def test_where_a_tier_lies_that_answered_with_an_error_at_first_is_known_once_it_answers(base: Path) -> None:
    kept, link = base / "k", base / "link"
    kept.mkdir(mode=0o700)
    link.symlink_to("x" * 300)
    mounts = Mounts(kept, "job", [link / "cache"])
    with pytest.raises(OSError, match="File name too long"):
        mounts.check(link / "cache")
    with mounted(base / "disk") as disk:
        link.unlink()
        link.symlink_to(disk)
        mounts.check(link / "cache")
        unmount(disk)
        for each in (mounts, Mounts(kept, "job", [link / "cache"])):
            with pytest.raises(FileNotFoundError, match=f"mounted on {disk} when the job began"):
                each.check(link / "cache")


def test_no_buffers_are_made_below_the_mount_point_of_a_place_that_is_unmounted(base: Path) -> None:
    with mounted(base / "disk") as disk, LoneDaemon(base) as daemon:
        daemon.places = [disk / "ram"]
        daemon.start()
        daemon.sync(1)
        unmount(disk)
        Snapshots(daemon.begin(1)).start(state(0))
        assert "is not mounted any more" in daemon.wait_for(TierTrouble).detail
        daemon.wait_for(NoRoom)
        assert list(disk.iterdir()) == []


def test_the_next_daemon_of_a_job_knows_what_was_mounted_and_the_next_job_begins_anew(base: Path) -> None:
    kept = base / "k"
    kept.mkdir(mode=0o700)
    with mounted(base / "disk") as disk:
        Mounts(kept, "job 1", [disk / "cache"]).check(disk / "cache")
        unmount(disk)
        with pytest.raises(FileNotFoundError, match=f"mounted on {disk} when the job began"):
            Mounts(kept, "job 1", [disk / "cache"]).check(disk / "cache")
        Mounts(kept, "job 2", [disk / "cache"]).check(disk / "cache")


def test_a_tier_whose_mount_point_goes_with_the_file_system_that_it_is_on_is_not_mounted(base: Path) -> None:
    kept = base / "k"
    kept.mkdir(mode=0o700)
    with mounted(base / "disk") as disk:
        with mounted(disk / "inner") as inner:
            mounts = Mounts(kept, "job", [inner / "cache", base / "elsewhere"])
        unmount(disk)
        with pytest.raises(FileNotFoundError, match=f"mounted on {inner}"):
            mounts.check(inner / "cache")
        mounts.check(base / "elsewhere")
