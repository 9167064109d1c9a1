"""The directory in RAM of a snapshot daemon, when there is no room in it for what its workers write down."""

import errno
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon
from mounts import needs_root, small_disk

from checkpoint import LocalShard, Snapshots
from checkpoint.protocol import Held, Skipped, TierTrouble, TierWell

WANTED = frozenset(["ram"])


def local_shards(step: int) -> list[LocalShard]:
    return [LocalShard("model/weight", (8, 64), (0, 0), torch.full((8, 64), float(step)), (8, 64))]


@needs_root
def test_a_worker_that_has_no_room_for_its_layout_trains_on_and_takes_snapshots_once_there_is_some(base: Path) -> None:
    with small_disk(base / "k", 256 << 10) as memory, LoneDaemon(base) as daemon:
        memory.chmod(0o700)
        daemon.start()
        snapshots = Snapshots(daemon.begin(1))
        filling = memory / "filling"
        with pytest.raises(OSError, match="No space left"), filling.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        snapshots.start(local_shards(0))
        trouble = daemon.wait_for(TierTrouble)
        assert (trouble.tier, trouble.errno) == ("ram", errno.ENOSPC)
        assert not snapshots.ready(), "nobody waits for buffers that nobody makes"
        for step in (1, 2):
            assert not snapshots.take(step, local_shards(step), {"step": step}, WANTED, wait_s=PATIENCE_S).copied
            assert daemon.wait_for(Skipped).step == step
        filling.unlink()
        assert snapshots.take(3, local_shards(3), {"step": 3}, WANTED, wait_s=PATIENCE_S).copied
        assert daemon.wait_for(Held).shard.key.step == 3
        assert [type(each) for each in daemon.news if isinstance(each, TierTrouble | TierWell)] == [TierTrouble, TierWell]
        snapshots.close()
