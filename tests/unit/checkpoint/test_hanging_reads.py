"""A node's tier that hangs while other nodes read it: real daemons, real connections."""

import asyncio
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from lone_daemon import PATIENCE_S, TOKEN, LoneDaemon

from checkpoint import LocalShard, Snapshots, shard_manifest
from checkpoint.daemon.server import Server
from checkpoint.errors import DamagedCheckpoint
from checkpoint.framing import encode
from checkpoint.handshake import WORKER_DAEMON, authenticate, daemon_keys
from checkpoint.protocol import Held, Listening
from checkpoint.shard_reads import ReadRequest
from checkpoint.tiers.remote import RemoteShard

KEY = daemon_keys(TOKEN)[WORKER_DAEMON]
READERS = 40  # more than a pool of threads has by default


def ask(connection: socket.socket, directory: Path) -> None:
    connection.sendall(encode(ReadRequest(directory=str(directory), file=shard_manifest.NAME)))


def test_a_tier_that_hangs_while_others_read_it_costs_nothing_that_is_in_memory(base: Path) -> None:
    with LoneDaemon(base, buffers=3) as daemon, ExitStack() as open_until_the_end:
        daemon.start()
        host, _, port = daemon.wait_for(Listening).address.rpartition(":")
        state = [LocalShard("model/weight", (8, 64), (0, 0), torch.zeros(8, 64), (8, 64))]
        snapshots = Snapshots(daemon.begin(1))
        snapshots.start(state)
        assert snapshots.ready()
        hangs = daemon.nvme / "step-00000001"
        hangs.mkdir(parents=True)
        os.mkfifo(hangs / shard_manifest.NAME)  # who reads it waits for good
        for _ in range(READERS):
            reader = open_until_the_end.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))
            ask(authenticate(reader, KEY, WORKER_DAEMON, timeout_s=PATIENCE_S), hangs)
        for step in (2, 3):  # behind all of these requests
            state[0].data.fill_(step)
            assert snapshots.take(step, state, {"step": step}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
            held = daemon.wait_for(Held)
            shard = RemoteShard(f"{host}:{port}", held.shard.directory, KEY)
            assert shard.manifest.step == step
            shard.close()
        daemon.sync(1)


@pytest.mark.parametrize("way", ["by its name", "by a step upwards", "by a link in the directory", "by a link for the file"])
def test_no_more_is_read_than_what_is_below_the_roots(base: Path, way: str) -> None:
    outside, tier = base / "outside", base / "tier"
    for each in (outside, tier, tier / "linked"):
        each.mkdir()
    (outside / shard_manifest.NAME).write_text("of somebody else")
    (tier / "link").symlink_to(outside)
    (tier / "linked" / shard_manifest.NAME).symlink_to(outside / shard_manifest.NAME)
    directory = {
        "by its name": outside,
        "by a step upwards": tier / ".." / "outside",
        "by a link in the directory": tier / "link",
        "by a link for the file": tier / "linked",
    }[way]

    async def read() -> None:
        port = Server([tier], daemon_keys(TOKEN)).start("127.0.0.1")
        await asyncio.to_thread(RemoteShard, f"127.0.0.1:{port}", str(directory), KEY)

    with pytest.raises(DamagedCheckpoint, match="not part of any tier"):
        asyncio.run(read())
