"""Somebody clears the RAM of a node under a run: real daemons, whose directory is gone."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots
from checkpoint.protocol import Clear, Cleared, Held, Retain, TierTrouble, TierWell
from checkpoint.tiers.session import CONTROL, SOCKET

WANTED = frozenset(["ram"])


def local_shards(step: int) -> list[LocalShard]:
    return [LocalShard("model/weight", (8, 64), (0, 0), torch.full((8, 64), float(step)), (8, 64))]


@pytest.fixture
def daemon(base: Path) -> Iterator[LoneDaemon]:
    with LoneDaemon(base) as daemon:
        daemon.start()
        yield daemon


def started(daemon: LoneDaemon, generation: int = 1, step: int = 0) -> Snapshots:
    """The worker of a generation, which goes on from a step."""
    snapshots = Snapshots(daemon.begin(generation))
    daemon.send(Retain(generation=generation, tier="ram", steps=(step,), upto=step))
    snapshots.start(local_shards(0))
    assert snapshots.ready(PATIENCE_S)
    return snapshots


def taken(daemon: LoneDaemon, snapshots: Snapshots, first: int) -> int:
    """The first step from this one on of which there is a snapshot; a few may be left out before."""
    for step in range(first, first + 10):
        if snapshots.take(step, local_shards(step), {"step": step}, WANTED, wait_s=PATIENCE_S).copied:
            assert daemon.wait_for(Held).shard.key.step == step
            daemon.send(Retain(generation=snapshots.session.generation, tier="ram", steps=(step,), upto=step))
            return step
    raise AssertionError("no snapshot is taken any more")


@pytest.mark.parametrize("buffers_too", [False, True])
def test_a_run_whose_ram_is_cleared_is_told_so_and_its_snapshots_go_on(daemon: LoneDaemon, buffers_too: bool) -> None:
    snapshots = started(daemon)
    assert taken(daemon, snapshots, 1) == 1
    for path in (daemon.directory, daemon.ram) if buffers_too else (daemon.directory,):
        shutil.rmtree(path)
    trouble = daemon.wait_for(TierTrouble)
    assert trouble.tier == "ram"
    assert str(daemon.directory) in trouble.detail
    step = 1
    for _ in range(3):  # more often than there are buffers
        step = taken(daemon, snapshots, step + 1)
    health = [type(each) for each in daemon.news if isinstance(each, TierTrouble | TierWell)]
    assert health in ([TierTrouble, TierWell], [TierTrouble, TierWell] * 2), "buffers that are gone are found one by one"
    snapshots.close()
    snapshots = started(daemon, 2, step)
    assert taken(daemon, snapshots, step + 1) == step + 1
    snapshots.close()


@pytest.mark.parametrize("name", [SOCKET, CONTROL, "buffers"])
def test_a_file_of_the_endpoint_that_is_gone_is_made_anew(daemon: LoneDaemon, name: str) -> None:
    snapshots = started(daemon)
    step = taken(daemon, snapshots, 1)  # by then the daemon has made all of them
    daemon.sync(1)
    (daemon.directory / name).unlink()
    assert name in daemon.wait_for(TierTrouble).detail
    step = taken(daemon, snapshots, step + 1)
    snapshots.close()
    snapshots = started(daemon, 2, step)
    assert taken(daemon, snapshots, step + 1) == step + 1
    snapshots.close()


def test_the_socket_of_another_process_stays(daemon: LoneDaemon) -> None:
    snapshots = started(daemon)
    path = daemon.directory / SOCKET
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        inode = path.stat().st_ino
        assert "another process has taken the place" in daemon.wait_for(TierTrouble).detail
        daemon.sync(1)
        assert path.stat().st_ino == inode
    snapshots.close()


def test_a_directory_that_the_daemon_itself_has_cleared_stays_away(daemon: LoneDaemon) -> None:
    started(daemon).close()
    daemon.send(Clear(generation=1, tiers=("ram",)))
    daemon.wait_for(Cleared)
    daemon.sync(1)
    assert not daemon.directory.exists()
    assert not [each for each in daemon.news if isinstance(each, TierTrouble)]
