"""The snapshot daemon by itself: who hangs does not stop it, and it stops nobody."""

import fcntl
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from daemon_worker import job, local_shards, take, worker
from lone_daemon import LoneDaemon

from checkpoint import Snapshots, metadata, shard_manifest, verify
from checkpoint.daemon.log_handler import NonBlockingHandler
from checkpoint.errors import DamagedCheckpoint
from checkpoint.framing import encode
from checkpoint.protocol import (
    BeginSession,
    Flushed,
    Held,
    Inventory,
    JobFailed,
    Listening,
    Retain,
    SnapshotKey,
    StartJob,
    Sync,
    Synced,
    TakeInventory,
)
from checkpoint.shard_manifest import ShardManifest
from checkpoint.source import DirectorySource
from checkpoint.tiers import copying, daemon_link, joint_commit
from checkpoint.tiers.copying import Copy
from checkpoint.tiers.pace import Pace
from checkpoint.tiers.session import SOCKET
from checkpoint.worker_news import StepSkipped


def test_a_log_that_nobody_reads_stops_no_daemon_and_says_afterwards_what_is_missing(base: Path) -> None:
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))
    os.set_blocking(full, True)
    with LoneDaemon(base, log_to=full) as daemon:
        daemon.write(b"nonsense\n")  # of which it has something to say
        daemon.start()
        daemon.write(b"nonsense\n" * 2)
        daemon.sync(1)
        os.read(unread, 1 << 20)
        daemon.write(b"nonsense\n")
        daemon.sync(1)
        said = os.read(unread, 1 << 20).decode().splitlines()
    os.close(unread)
    os.close(full)
    assert len(said) == 2, said
    assert said[0] == "... 3 lines left out, which nobody has read"
    assert " WARNING checkpoint.daemon.daemon: refused: not a message" in said[1]


def test_a_line_that_only_a_part_of_had_room_counts_as_left_out_and_the_next_begins_anew() -> None:
    unread, pipe = os.pipe()
    handler = NonBlockingHandler(pipe)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 2 * select.PIPE_BUF)
    for text in ("a" * 3 * select.PIPE_BUF, "b"):
        handler.handle(logging.makeLogRecord({"msg": text}))
    parts = [os.read(unread, 1 << 20).decode()]
    for text in ("c", "d"):
        handler.handle(logging.makeLogRecord({"msg": text}))
    parts.append(os.read(unread, 1 << 20).decode())
    os.close(unread)
    handler.handle(logging.makeLogRecord({"msg": "to nobody"}))
    os.close(pipe)
    assert parts == ["a" * 2 * select.PIPE_BUF, "\n... 2 lines left out, which nobody has read\nc\nd\n"]


@pytest.mark.parametrize("begun", ["inventory", "forgotten"])
def test_a_tier_that_hangs_costs_nothing_that_is_in_memory(base: Path, begun: str) -> None:
    with LoneDaemon(base, buffers=3, tier_s=0.2) as daemon:
        daemon.start()
        assert take(daemon, worker(daemon, 1), 1).shard.tier == "ram"
        hangs = daemon.nvme / "step-00000001"
        for each in (daemon.nvme, hangs):
            each.mkdir(mode=0o700)
        os.mkfifo(hangs / shard_manifest.NAME)  # who reads it waits for good
        if begun == "forgotten":
            daemon.send(Retain(generation=1, tier="nvme", steps=(2,), upto=2))
        for _ in range(8):  # more often than there are threads for everybody
            daemon.send(TakeInventory(generation=1))
            assert [(each.tier, each.key.step) for each in daemon.wait_for(Inventory).shards] == [("ram", 1)]
        snapshots = worker(daemon, 2)
        assert take(daemon, snapshots, 2).shard.tier == "ram"


@contextmanager
def stopped(daemon: LoneDaemon) -> Iterator[None]:
    os.kill(daemon.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED)
    yield
    os.kill(daemon.process.pid, signal.SIGCONT)


@contextmanager
def deaf(daemon: LoneDaemon) -> Iterator[None]:
    """It is stopped meanwhile, and what other ranks of its node say fills its inbox."""
    with stopped(daemon):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others, suppress(BlockingIOError):
            others.setblocking(False)
            while True:
                others.sendto(encode(StepSkipped(generation=1, rank=9, step=1)), str(daemon.directory / SOCKET))
        yield
    daemon.sync(1)


def test_a_daemon_that_hears_nothing_for_a_while_is_told_later_what_has_become_of_its_lease(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_link, "REPORT_S", 0.01)
    snapshots = worker(daemon, 1)
    daemon.wait_for_lease()
    with deaf(daemon):
        assert snapshots.take(1, local_shards(1), {"step": 1}, frozenset(["ram"])).copied
    with stopped(daemon):  # so that there is no buffer again, however quick it is
        assert not snapshots.take(2, local_shards(2), {"step": 2}, frozenset(["ram"])).copied, "it is told with the next snapshot"
    assert daemon.wait_for(Held).shard.key.step == 1
    assert take(daemon, snapshots, 3).shard.key.step == 3


def test_a_daemon_that_hears_nothing_is_told_later_what_will_be_written(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_link, "REPORT_S", 0.01)
    snapshots = Snapshots(daemon.begin(1))
    with deaf(daemon):
        snapshots.start(local_shards(0))
    with stopped(daemon):
        assert not snapshots.take(1, local_shards(1), {"step": 1}, frozenset(["ram"])).copied
    assert take(daemon, snapshots, 2).shard.key.step == 2


def test_a_daemon_that_hangs_holds_up_training_once(daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(_: float) -> None:
        raise AssertionError("training waits")

    snapshots = worker(daemon, 1)
    daemon.wait_for_lease()
    with deaf(daemon):
        assert snapshots.take(1, local_shards(1), {"step": 1}, frozenset(["ram"])).copied
        with monkeypatch.context() as patched:
            patched.setattr(time, "sleep", waits)
            for step in range(2, 5):
                assert not snapshots.take(step, local_shards(step), {"step": step}, frozenset(["ram"])).copied


def test_an_agent_that_reads_nothing_does_not_stop_the_daemon(daemon: LoneDaemon) -> None:
    count = 4096
    daemon.write(encode(Sync(generation=1)) * count)  # more answers than a pipe holds
    daemon.send(BeginSession(generation=3, node_rank=0, nodes=1, first_rank=0, ranks=1))
    word = None
    while word is None or word.read().generation != 3:
        word = daemon.word if (daemon.directory / "control").exists() else None
    for _ in range(count):
        assert daemon.wait_for(Synced).generation == 1
    assert daemon.sync(3).generation == 3


def test_all_news_carry_the_generation_of_the_present_session(base: Path) -> None:
    with LoneDaemon(base) as daemon:
        daemon.start(4)
        assert daemon.wait_for(Listening).generation == 4
        daemon.begin(5)
        daemon.send(StartJob(generation=5, kind="copy", job_id=1, tier="nvme", key=SnapshotKey(1, 4), shard=0))
        failed = daemon.wait_for(JobFailed)
        assert (failed.generation, failed.superseded, failed.key) == (5, False, SnapshotKey(1, 4))
        daemon.send(StartJob(generation=5, kind="copy", job_id=2, tier="unheard of", key=SnapshotKey(1, 4), shard=0))
        assert "has no tier" in daemon.wait_for(JobFailed).reason


def test_a_flush_whose_source_was_overwritten_leaves_nothing_that_a_later_one_would_trust(daemon: LoneDaemon) -> None:
    snapshots = worker(daemon, 1)
    take(daemon, snapshots, 1)
    path = daemon.held_path(1)
    held: ShardManifest = shard_manifest.read(path)
    documents = {name: (path / name).read_bytes() for name in held.files}

    class Overwritten(DirectorySource):
        trusted = True

        def view(self, shard: Any, slot: int, count: int) -> memoryview:
            return memoryview(bytearray(super().view(shard, slot, count).nbytes))

        def check(self) -> None:
            raise DamagedCheckpoint(self.path, "it was overwritten while it was read")

    copy = Copy(Pace(None), threading.Event(), lambda size_bytes: None)
    bad = Overwritten(path, chunks=held.chunks)
    copy.check = bad.check
    with pytest.raises(DamagedCheckpoint, match="overwritten"):
        copying.flush(bad, held, documents, daemon.durable, 1, copy)
    daemon.send(job("flush", "durable", 1))
    assert daemon.wait_for(Flushed).shard == 0
    joint_commit.finish(held, documents, daemon.durable, 1)
    verify(daemon.durable / "step-00000001")


WORKER_OF_UMLAUTS = """
import sys
from pathlib import Path
import torch
from checkpoint import LocalShard, Snapshots
state = [LocalShard("model/weight", (8, 64), (0, 0), torch.ones(8, 64), (8, 64))]
snapshots = Snapshots(Path(sys.argv[1]))
snapshots.start(state)
assert snapshots.take(1, state, {"gr\\u00f6\\u00dfe": "\\u00fc"}, frozenset(["ram"]), wait_s=120.0).copied
"""


def test_a_state_that_is_not_ascii_is_snapshotted_whatever_the_locale_is(base: Path) -> None:
    environ = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with LoneDaemon(base) as daemon:
        daemon.start()
        subprocess.run([sys.executable, "-c", WORKER_OF_UMLAUTS, daemon.begin(1)], env=environ, check=True)
        held = Path(daemon.wait_for(Held).shard.directory)
        assert metadata.parse(held, (held / metadata.NAME).read_bytes()).state == {"größe": "ü"}


def test_a_plain_user_of_the_package_pays_for_neither_torch_nor_messages() -> None:
    heavy = ("torch", "zarr", "numpy", "msgspec", "asyncio", "tenacity")
    code = f"import sys, checkpoint; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
