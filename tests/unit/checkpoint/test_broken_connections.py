"""What a reader does with connections on which something went wrong: a real daemon, and its sockets as the kernel lists them."""

import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from lone_daemon import PATIENCE_S, TOKEN, LoneDaemon

from checkpoint import LocalShard, Snapshots, metadata
from checkpoint.errors import DamagedCheckpoint
from checkpoint.handshake import WORKER_DAEMON, daemon_keys
from checkpoint.protocol import Held, Listening
from checkpoint.tiers.copying import shards_of
from checkpoint.tiers.remote import RemoteShard

KEY = daemon_keys(TOKEN)[WORKER_DAEMON]


def connections(address: str) -> int:
    """How many of this process there are to an address."""
    host, _, port = address.rpartition(":")
    return sum(each.raddr == (host, int(port)) for each in psutil.Process().net_connections("tcp"))


def test_a_connection_on_which_something_went_wrong_is_closed_at_once(base: Path) -> None:
    with LoneDaemon(base) as daemon:
        daemon.start()
        address = daemon.wait_for(Listening).address
        state = [LocalShard("model/weight", (8, 64), (0, 0), torch.ones(8, 64), (8, 64))]
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(state)
        assert snapshots.ready()
        assert snapshots.take(1, state, {"step": 1}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
        shorter = daemon.nvme / "step-00000001"
        shutil.copytree(daemon.wait_for(Held).shard.directory, shorter)
        with pytest.raises(DamagedCheckpoint):
            RemoteShard(address, str(daemon.nvme / "none"), KEY)
        assert connections(address) == 0
        remote = RemoteShard(address, str(shorter), KEY)
        ((name, chunks),) = remote.manifest.chunks.items()
        shard = shards_of(remote.document(metadata.NAME), remote.path)[name]
        os.truncate(shorter / name, 100)
        for _ in range(5):
            with pytest.raises(DamagedCheckpoint, match="ends early"):
                remote.read(shard, min(chunks), memoryview(bytearray(shard.array.slot_bytes)))
            assert connections(address) == 0
        assert remote.document(metadata.NAME)
        assert connections(address) == 1
        remote.close()
        assert connections(address) == 0
