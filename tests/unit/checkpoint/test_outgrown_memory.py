"""A state that grows while it trains, as where parameters become trainable, beyond what is left of the memory: real daemons."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, TOKEN, LoneDaemon
from mounts import needs_root, small_disk

from checkpoint import LocalShard, Snapshots
from checkpoint.handshake import WORKER_DAEMON, daemon_keys
from checkpoint.protocol import (
    Clear,
    Cleared,
    Held,
    Inventory,
    Listening,
    Retain,
    SnapshotKey,
    StartJob,
    TakeInventory,
    TierTrouble,
)
from checkpoint.tiers.mappings import Mappings
from checkpoint.tiers.remote import RemoteShard

pytestmark = needs_root

MEMORY_BYTES = 4 << 20
SMALL, HALF, LARGE = 64, 1100, 2500  # KiB of a state: three of the first, two of the second and one of the last have room in memory
WANTED = frozenset(["ram"])
KEY = daemon_keys(TOKEN)[WORKER_DAEMON]


@pytest.fixture
def memory(base: Path) -> Iterator[Path]:
    with small_disk(base / "ram", MEMORY_BYTES) as memory:
        memory.chmod(0o700)
        yield memory


@contextmanager
def started(base: Path, *, pause_at: str | None = None, elsewhere: bool = True) -> Iterator[LoneDaemon]:
    """A daemon that may have its buffers in memory, or else on the node's disk."""
    with LoneDaemon(base, buffers=3, pause_at=pause_at) as daemon:
        if elsewhere:
            daemon.places.append(slabs(daemon))
        daemon.start()
        yield daemon


def slabs(daemon: LoneDaemon) -> Path:
    return daemon.nvme / "slabs"


def local_shards(step: int, rows: int) -> list[LocalShard]:
    """Of so many KiB."""
    return [LocalShard("model/weight", (rows, 256), (0, 0), torch.full((rows, 256), float(step)), (8, 256))]


def take(daemon: LoneDaemon, snapshots: Snapshots, step: int, rows: int, generation: int = 1) -> Held:
    """A snapshot, sealed: it alone is needed from now on."""
    assert snapshots.take(step, local_shards(step, rows), {"step": step}, WANTED, wait_s=PATIENCE_S).copied, step
    held = daemon.wait_for(Held)
    daemon.send(Retain(generation=generation, tier="ram", steps=(step,), upto=step))
    daemon.sync(generation)
    return held


def begin(daemon: LoneDaemon) -> Snapshots:
    """A worker with a small state that has taken a snapshot of step 1."""
    snapshots = Snapshots(daemon.begin(1))
    snapshots.start(local_shards(0, SMALL))
    assert snapshots.ready()
    take(daemon, snapshots, 1, SMALL)
    return snapshots


def inventory(daemon: LoneDaemon, generation: int = 1) -> list[tuple[str, int, str]]:
    daemon.send(TakeInventory(generation=generation))
    return [(each.tier, each.key.step, each.directory) for each in daemon.wait_for(Inventory).shards]


def used_bytes(memory: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in memory.rglob("*") if each.is_file() and not each.is_symlink())


def test_a_state_that_grows_beyond_memory_has_snapshots_in_a_slower_place_and_the_one_before_is_kept(
    base: Path, memory: Path
) -> None:
    with started(base) as daemon:
        address = daemon.wait_for(Listening).address
        snapshots = begin(daemon)
        snapshots.start(local_shards(0, LARGE))
        daemon.wait_for(TierTrouble)
        daemon.wait_for_lease()
        first = memory / "step-00000001"
        assert inventory(daemon) == [("ram", 1, str(first))]
        remote = RemoteShard(address, str(first), KEY)
        assert remote.documents()
        remote.close()
        daemon.send(StartJob(generation=1, kind="copy", job_id=7, tier="nvme", key=SnapshotKey(1, 1), shard=0))
        assert daemon.wait_for(Held).shard.tier == "nvme"
        for step in (2, 3, 4):
            take(daemon, snapshots, step, LARGE)
        assert not first.exists() and used_bytes(memory) == 0
        ram = [(step, Path(place).parent) for tier, step, place in inventory(daemon) if tier == "ram"]
        assert (4, slabs(daemon)) in ram
        daemon.send(Clear(generation=1, tiers=("ram", "nvme")))
        daemon.wait_for(Cleared)
        assert not list(memory.iterdir()) and not daemon.nvme.exists()


@pytest.mark.parametrize("dies", [False, True], ids=["workers die", "the daemon dies, too"])
def test_what_was_left_in_memory_is_kept_by_the_generations_and_daemons_that_follow(base: Path, memory: Path, dies: bool) -> None:
    with started(base) as daemon:
        begin(daemon).start(local_shards(0, LARGE))
        daemon.wait_for(TierTrouble)
        daemon.wait_for_lease()
        if not dies:
            go_on(daemon, memory)
    if dies:
        with started(base) as daemon:
            go_on(daemon, memory)


def go_on(daemon: LoneDaemon, memory: Path) -> None:
    """Another generation, whose state is as large from the beginning: memory has no room for it either."""
    first = ("ram", 1, str(memory / "step-00000001"))
    assert inventory(daemon) == [first]
    snapshots = Snapshots(daemon.begin(2))
    snapshots.start(local_shards(0, LARGE))
    assert snapshots.ready()
    assert inventory(daemon, 2) == [first]
    take(daemon, snapshots, 2, LARGE, 2)
    assert not (memory / "step-00000001").exists() and used_bytes(memory) == 0
    daemon.send(Clear(generation=2, tiers=("ram", "nvme")))
    daemon.wait_for(Cleared)
    assert not list(memory.iterdir()) and not daemon.nvme.exists()


def test_a_daemon_that_dies_before_it_has_left_memory_is_followed_by_one_that_finds_what_is_there(base: Path, memory: Path) -> None:
    with started(base) as daemon:
        take(daemon, begin(daemon), 2, SMALL)
    kept = (memory / "step-00000002").resolve()
    for buffer in memory.glob("buffer-*"):  # as it does before others are made
        if buffer != kept:
            shutil.rmtree(buffer)
    assert kept.name != "buffer-0"
    (slabs(daemon) / "buffer-0").mkdir(parents=True)
    with started(base) as daemon:
        assert inventory(daemon) == [("ram", 2, str(memory / "step-00000002"))]


def test_a_step_that_is_taken_again_in_memory_takes_the_place_of_what_was_left_there(base: Path, memory: Path) -> None:
    with started(base) as daemon:
        begin(daemon).start(local_shards(0, LARGE))
        daemon.wait_for(TierTrouble)
        daemon.wait_for_lease()
        snapshots = Snapshots(daemon.begin(2))
        snapshots.start(local_shards(0, SMALL))
        assert snapshots.ready()
        held = take(daemon, snapshots, 1, SMALL, 2)
        assert (held.shard.key, Path(held.shard.directory).parent) == (SnapshotKey(1, 2), memory)
        assert inventory(daemon, 2) == [("ram", 1, held.shard.directory)]


def test_a_buffer_that_a_job_reads_stays_until_the_job_is_done(base: Path, memory: Path) -> None:
    with started(base, pause_at="copy_begun") as daemon:
        snapshots = begin(daemon)
        daemon.send(StartJob(generation=1, kind="copy", job_id=7, tier="nvme", key=SnapshotKey(1, 1), shard=0))
        daemon.reached()
        snapshots.start(local_shards(0, LARGE))
        daemon.wait_for(TierTrouble)
        daemon.sync(1)
        assert (memory / "step-00000001").is_symlink()
        daemon.go()
        assert daemon.wait_for(Held).shard.tier == "nvme"
        take(daemon, snapshots, 2, LARGE)
        assert used_bytes(memory) == 0


def test_memory_is_not_filled_with_what_has_no_room(base: Path, memory: Path) -> None:
    with started(base, elsewhere=False) as daemon:
        snapshots = begin(daemon)
        before = used_bytes(memory)
        snapshots.start(local_shards(0, LARGE))
        daemon.wait_for(TierTrouble)
        daemon.sync(1)
        assert used_bytes(memory) <= before
        assert inventory(daemon) == [("ram", 1, str(memory / "step-00000001"))]


def test_two_buffers_in_memory_are_enough_where_a_third_has_no_room(base: Path, memory: Path) -> None:
    with started(base) as daemon:
        snapshots = begin(daemon)
        snapshots.start(local_shards(0, HALF))
        assert snapshots.ready()
        for step, needed in ((2, (2,)), (3, (2, 3))):  # behind the second nothing is leased
            assert snapshots.take(step, local_shards(step, HALF), {"step": step}, WANTED, wait_s=PATIENCE_S).copied
            daemon.wait_for(Held)
            daemon.send(Retain(generation=1, tier="ram", steps=needed, upto=step))
            daemon.wait_for(TierTrouble)
        daemon.send(Retain(generation=1, tier="ram", steps=(3,), upto=3))
        assert take(daemon, snapshots, 4, HALF).shard.directory == str(memory / "step-00000004")
        assert not slabs(daemon).exists()


def test_a_worker_maps_the_buffer_that_is_there_and_not_one_with_its_inode_number(tmp_path: Path) -> None:
    with small_disk(tmp_path / "ram", MEMORY_BYTES) as ram, small_disk(tmp_path / "disk", MEMORY_BYTES) as disk:
        for place in (ram, disk):
            (place / "buffer-0").mkdir()
        assert (ram / "buffer-0").stat().st_ino == (disk / "buffer-0").stat().st_ino
        link = tmp_path / "buffers"
        link.symlink_to(ram)
        mappings = Mappings(link, [], None)
        first = mappings.buffer(0)
        assert mappings.buffer(0) is first
        link.unlink()
        link.symlink_to(disk)
        second = mappings.buffer(0)
        assert second is not first
        shutil.rmtree(disk / "buffer-0")
        (disk / "buffer-0").mkdir()
        assert mappings.buffer(0) is not second
        mappings.close()
