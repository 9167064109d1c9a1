"""Workers that announce other arrays while they train: a real daemon makes buffers for these, and keeps what it holds."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots
from checkpoint.protocol import Held, Retain, Skipped, TierTrouble


@pytest.fixture
def base() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="anew-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def local_shards(step: int, rows: int) -> list[LocalShard]:
    return [LocalShard("model/weight", (rows, 64), (0, 0), torch.full((rows, 64), float(step)), (rows, 64))]


def take(daemon: LoneDaemon, snapshots: Snapshots, step: int, rows: int) -> None:
    """A snapshot, sealed: it alone is needed from now on."""
    assert snapshots.take(step, local_shards(step, rows), {"step": step}, frozenset(["ram"]), wait_s=PATIENCE_S).copied, step
    assert daemon.wait_for(Held).shard.key.step == step
    daemon.send(Retain(generation=1, tier="ram", steps=(step,), upto=step))


def held(daemon: LoneDaemon, step: int) -> np.ndarray:
    found = zarr.open_group(daemon.held_path(step), mode="r")["model/weight"][:]
    return np.asarray(found)


@pytest.mark.parametrize("buffers", [2, 3])
def test_snapshots_go_on_with_other_arrays_each_time_and_hold_what_was_given(base: Path, buffers: int, rounds: int) -> None:
    with LoneDaemon(base, buffers=buffers) as daemon:
        daemon.start()
        snapshots = Snapshots(daemon.begin(1))
        for step in range(1, 8 * rounds):
            rows = (8, 24, 16)[step % 3]
            snapshots.start(local_shards(0, rows))
            take(daemon, snapshots, step, rows)
            found = held(daemon, step)
            assert found.shape == (rows, 64) and (found == step).all()
        assert not [news for news in daemon.news if isinstance(news, Skipped | TierTrouble)]


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "once a buffer is leased"])
def test_a_buffer_that_is_leased_for_what_was_announced_before_is_not_used(base: Path, waits: bool) -> None:
    with LoneDaemon(base, buffers=2) as daemon:
        daemon.start()
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(local_shards(0, 8))
        take(daemon, snapshots, 1, 8)
        if waits:
            daemon.sync(1)
        snapshots.start(local_shards(0, 24))
        assert (held(daemon, 1) == 1).all() and held(daemon, 1).shape == (8, 64), "it is kept"
        take(daemon, snapshots, 2, 24)
        assert (held(daemon, 2) == 2).all() and held(daemon, 2).shape == (24, 64)
        assert not [news for news in daemon.news if isinstance(news, Skipped | TierTrouble)]


def test_a_daemon_that_is_started_anew_leases_buffers_for_what_was_announced_last(base: Path) -> None:
    with LoneDaemon(base, buffers=2) as daemon:
        daemon.start()
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(local_shards(0, 8))
        take(daemon, snapshots, 1, 8)
        snapshots.start(local_shards(0, 24))
    with LoneDaemon(base, buffers=2) as daemon:
        daemon.start()
        daemon.begin(1)
        daemon.send(Retain(generation=1, tier="ram", steps=(1,), upto=1))
        take(daemon, snapshots, 2, 24)
        assert (held(daemon, 2) == 2).all() and held(daemon, 2).shape == (24, 64)
