"""The snapshot daemon by itself: what it leases to whom, what it refuses, and that nobody stops it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_daemon import PATIENCE_S, TOKEN, LoneDaemon

from checkpoint import LocalShard, Snapshots, points, shard_manifest, verify
from checkpoint.daemon.buffers import Buffers
from checkpoint.errors import DamagedCheckpoint
from checkpoint.framing import encode
from checkpoint.handshake import WORKER_DAEMON, Client, authenticate, daemon_keys
from checkpoint.protocol import (
    BeginSession,
    Flushed,
    Held,
    Inventory,
    JobFailed,
    Listening,
    ReadReply,
    Retain,
    Skipped,
    SnapshotKey,
    StartJob,
    StateCopied,
    StepSkipped,
    Sync,
    Synced,
    TakeInventory,
    TierTrouble,
)
from checkpoint.shard_manifest import ShardManifest
from checkpoint.source import DirectorySource
from checkpoint.tiers import cadence, copying
from checkpoint.tiers import snapshots as tiers_snapshots
from checkpoint.tiers.copying import Copy
from checkpoint.tiers.lease import Lease, LeaseWord, buffer_path, layout_of
from checkpoint.tiers.pace import Pace
from checkpoint.tiers.remote import RemoteShard
from checkpoint.tiers.session import SOCKET

KEY = daemon_keys(TOKEN)[WORKER_DAEMON]


def local_shards(step: int, rows: int = 8) -> list[LocalShard]:
    """The state of the only rank after a step."""
    return [LocalShard("model/weight", (rows, 64), (0, 0), torch.full((rows, 64), float(step)), (rows, 64))]


def worker(daemon: LoneDaemon, generation: int, rows: int = 8) -> Snapshots:
    """A worker that has announced its layout, and for which there are buffers."""
    snapshots = Snapshots(daemon.begin(generation))
    snapshots.start(local_shards(0, rows))
    assert snapshots.ready()
    return snapshots


def take(daemon: LoneDaemon, snapshots: Snapshots, step: int) -> Held:
    """A snapshot, sealed."""
    assert snapshots.take(step, local_shards(step), {"step": step}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
    return daemon.wait_for(Held)


def job(kind: Any, tier: str, step: int, job_id: int = 7) -> StartJob:
    return StartJob(generation=1, kind=kind, job_id=job_id, tier=tier, key=SnapshotKey(step, 1), shard=0)


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


# -- leases ----------------------------------------------------------------------------------------------------------------


def test_buffers_made_for_the_workers_before_are_never_leased_to_those_of_the_next_generation(base: Path) -> None:
    with LoneDaemon(base, pause_at="buffer_ready") as daemon:
        daemon.start()
        Snapshots(daemon.begin(1)).start(local_shards(0, 8))
        daemon.reached()  # a thread makes a buffer of the first layout
        session = daemon.begin(2)
        daemon.go()
        later = Snapshots(session)
        later.start(local_shards(0, 24))
        generation, index = daemon.wait_for_lease()
        daemon.sync(2)
        layouts = {layout_of(buffer_path(daemon.ram, each)) for each in range(2)}
        assert generation == 2
        assert len(layouts) == 1 and layout_of(buffer_path(daemon.ram, index)) in layouts
        assert later.ready()
        assert later.take(1, local_shards(1, 24), {}, frozenset(["ram"]), wait_s=PATIENCE_S).copied
        assert daemon.wait_for(Held).shard.size_bytes > 24 * 64 * 4
        assert not [news for news in daemon.news if isinstance(news, Skipped | TierTrouble)]


def test_a_worker_uses_leases_of_its_own_generation_only(daemon: LoneDaemon) -> None:
    worker(daemon, 1)
    session = daemon.base / "session.json"
    text = session.read_text().replace('"generation": 1', '"generation": 2')
    session.write_text(text)  # its daemon has not begun that session yet
    later = Snapshots(session)
    later.start(local_shards(0))
    assert LeaseWord(daemon.directory / "control").read().generation == 1
    assert not later.ready(patience_s=0.0)
    assert not later.take(1, local_shards(1), {}, frozenset(["ram"])).copied


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_job_neither_takes_a_leased_buffer_from_a_worker_nor_reads_it(daemon: LoneDaemon, elsewhere: bool) -> None:
    snapshots = worker(daemon, 1)
    take(daemon, snapshots, 1)
    take(daemon, snapshots, 2)
    if elsewhere:
        daemon.send(job("copy", "nvme", 1))
        assert daemon.wait_for(Held).shard.tier == "nvme"
    daemon.send(Retain(generation=1, tier="ram", steps=(2,), upto=2))  # the buffer of step 1 is leased now
    ended: list[Flushed | JobFailed] = []

    def flush_what_the_buffer_held() -> None:
        daemon.send(job("flush", "durable", 1, 8))
        ended.append(daemon.wait_for(Flushed if elsewhere else JobFailed))  # type: ignore[type-var]

    points.arm("snapshot_acquired", flush_what_the_buffer_held)  # it has begun, and has not said so
    held = take(daemon, snapshots, 3)
    assert held.shard.key == SnapshotKey(3, 1)
    (end,) = ended
    assert end.job_id == 8
    assert isinstance(end, Flushed) or end.superseded
    assert not [news for news in daemon.news if isinstance(news, Skipped)]


def test_a_buffer_that_a_job_reads_is_not_leased_although_it_is_needed_no_more(base: Path) -> None:
    with LoneDaemon(base, pause_at="flush_begun") as daemon:
        daemon.start()
        snapshots = worker(daemon, 1)
        take(daemon, snapshots, 1)
        daemon.send(job("flush", "durable", 1))
        daemon.reached()
        take(daemon, snapshots, 2)
        daemon.send(Retain(generation=1, tier="ram", steps=(2,), upto=2))
        daemon.sync(1)
        assert daemon.word.read().buffer is None
        daemon.go()
        assert daemon.wait_for(Flushed).job_id == 7
        assert take(daemon, snapshots, 3).shard.key.step == 3


@pytest.mark.parametrize("told", ["before it is sealed", "after it is sealed"])
def test_a_step_taken_again_is_kept_although_all_were_told_before_to_leave_it_out(daemon: LoneDaemon, told: str) -> None:
    snapshots = worker(daemon, 1)
    take(daemon, snapshots, 1)
    left_out = Retain(generation=1, tier="ram", steps=(1,), upto=1, left_out=(2,))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        rank.sendto(encode(StepSkipped(generation=1, rank=0, step=2)), str(daemon.directory / SOCKET))
    assert not daemon.wait_for(Skipped).again
    if told == "before it is sealed":
        daemon.send(left_out)
        daemon.sync(1)
    assert snapshots.take(2, local_shards(2), {"step": 2}, frozenset(["ram"]), wait_s=PATIENCE_S, again=True).copied
    assert daemon.wait_for(Held).again
    if told == "after it is sealed":
        daemon.send(left_out)
        daemon.sync(1)
    daemon.send(job("flush", "durable", 2))
    daemon.sync(1)
    assert daemon.wait_for(Flushed).key == SnapshotKey(2, 1)
    daemon.send(Retain(generation=1, tier="ram", steps=(1,), upto=2))  # something newer is complete
    assert take(daemon, snapshots, 3).shard.key.step == 3


def test_a_snapshot_after_a_long_time_waits_for_a_buffer_before_it_is_left_out(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = worker(daemon, 1)
    take(daemon, snapshots, 1)
    take(daemon, snapshots, 2)  # no buffer is left
    assert not snapshots.take(3, local_shards(3), {}, frozenset(["ram"])).copied
    monkeypatch.setattr(cadence, "PATIENCE", 1e9)
    monkeypatch.setattr(cadence, "LONGEST_WAIT_S", PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(snapshots.take, 4, local_shards(4), {}, frozenset(["ram"]))
        wait([taken], 0.3)
        daemon.send(Retain(generation=1, tier="ram", steps=(2,), upto=2))
        assert taken.result().copied
    assert daemon.wait_for(Held).shard.key.step == 4


def test_a_step_that_cannot_be_taken_again_either_is_reported_as_such(daemon: LoneDaemon) -> None:
    snapshots = worker(daemon, 1)
    take(daemon, snapshots, 1)
    take(daemon, snapshots, 2)  # no buffer is left
    for again in (False, True):
        assert not snapshots.take(3, local_shards(3), {}, frozenset(["ram", "durable"]), again=again).copied
        skipped = daemon.wait_for(Skipped)
        assert (skipped.again, skipped.wants) == (again, ("durable", "ram"))


@contextmanager
def deaf(daemon: LoneDaemon) -> Iterator[None]:
    """It is stopped meanwhile, and what other ranks of its node say fills its inbox."""
    os.kill(daemon.process.pid, signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others, suppress(BlockingIOError):
        others.setblocking(False)
        while True:
            others.sendto(encode(StepSkipped(generation=1, rank=9, step=1)), str(daemon.directory / SOCKET))
    yield
    os.kill(daemon.process.pid, signal.SIGCONT)
    daemon.sync(1)


def test_a_daemon_that_hears_nothing_for_a_while_is_told_later_what_has_become_of_its_lease(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_snapshots, "REPORT_S", 0.01)
    snapshots = worker(daemon, 1)
    daemon.wait_for_lease()
    with deaf(daemon):
        assert snapshots.take(1, local_shards(1), {"step": 1}, frozenset(["ram"])).copied
    assert not snapshots.take(2, local_shards(2), {"step": 2}, frozenset(["ram"])).copied, "it is told with the next snapshot"
    assert daemon.wait_for(Held).shard.key.step == 1
    assert take(daemon, snapshots, 3).shard.key.step == 3


def test_a_daemon_that_hears_nothing_is_told_later_what_will_be_written(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_snapshots, "REPORT_S", 0.01)
    snapshots = Snapshots(daemon.begin(1))
    with deaf(daemon):
        snapshots.start(local_shards(0))
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


def test_the_bookkeeping_of_buffers_refuses_every_thread_but_its_own(tmp_path: Path) -> None:
    buffers = Buffers(tmp_path / "ram", 2)
    uses: list[Callable[[], object]] = [
        buffers.rescan,
        buffers.held,
        buffers.begin,
        buffers.lease,
        lambda: buffers.find(SnapshotKey(1, 1)),
        lambda: buffers.retain(lambda held: True),
        lambda: buffers.forget(1),
        lambda: buffers.give_back(0),
        lambda: buffers.doubt(0),
        lambda: buffers.misfits,
        lambda: buffers.empty,
        lambda: asyncio.run(buffers.renew()),
        lambda: asyncio.run(buffers.clear()),
    ]
    with ThreadPoolExecutor(1) as other:
        for use in uses:
            with pytest.raises(AssertionError, match="thread of the event loop"):
                other.submit(use).result()
    buffers.rescan()


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_what_is_no_message_is_refused_in_one_line_of_log_and_ends_nothing(base: Path) -> None:
    with LoneDaemon(base) as daemon:
        daemon.write(b"before the settings\n")
        daemon.start()
        daemon.write(b'nonsense\n{"type": "retain", "generation": "one"}\n{"type": "unheard_of"}\n\xff\xfe\n[]\n')
        assert daemon.sync(1) == Synced(generation=1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
            for report in (b"nonsense", b'{"type": "state_copied"}', encode(Sync(generation=1)), b""):
                rank.sendto(report, str(daemon.directory / SOCKET))
        assert daemon.sync(1) == Synced(generation=1)
        lines = daemon.log.read_text().splitlines()
        assert len(lines) == 10 and all("refused" in line for line in lines), lines


def test_a_report_for_no_lease_of_no_step_is_dropped(daemon: LoneDaemon) -> None:
    snapshots = worker(daemon, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
        report = StateCopied(generation=1, rank=0, step=5, lease=10**6, stall_s=0.0, wants=(), changed=True, size_bytes=0)
        rank.sendto(encode(report), str(daemon.directory / SOCKET))
        stranger = StateCopied(generation=1, rank=9, step=6, lease=1, stall_s=0.0, wants=(), changed=True, size_bytes=0)
        rank.sendto(encode(stranger), str(daemon.directory / SOCKET))
    assert daemon.wait_for(Skipped).step == 5
    assert take(daemon, snapshots, 7).shard.key.step == 7


def test_a_connection_that_speaks_something_else_is_refused_and_others_are_served(daemon: LoneDaemon) -> None:
    address = daemon.wait_for(Listening).address
    snapshots = worker(daemon, 1)
    held = take(daemon, snapshots, 1)
    host, _, port = address.rpartition(":")
    guess = Client("a guess", WORKER_DAEMON, "", "").opening
    for opening in (b"GET / HTTP/1.1\r\n\r\n", guess, b"nonsense\n", b"x" * (1 << 17)):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            assert_hung_up(stranger, opening)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as known:
        authenticate(known, KEY, WORKER_DAEMON, timeout_s=PATIENCE_S)
        assert_hung_up(known, b"nonsense\n")
    shard = RemoteShard(address, held.shard.directory, KEY)
    assert shard.manifest.step == 1
    assert shard.documents().keys() == shard.manifest.files.keys()
    shard.close()
    outside = RemoteShard.__new__(RemoteShard)
    with pytest.raises(DamagedCheckpoint, match="not part of any tier"):
        outside.__init__(address, "/etc", KEY)  # type: ignore[misc]
    log = daemon.log.read_text()
    assert "Traceback" not in log and log.count("is refused") == 1 and log.count("refused before its handshake") == 1


def assert_hung_up(stranger: socket.socket, words: bytes) -> None:
    try:
        stranger.sendall(words)
        assert stranger.recv(1) == b""
    except ConnectionError:
        pass  # it was closed while something was still under way


def test_an_answer_that_is_no_message_means_that_the_node_cannot_be_reached() -> None:
    def answer(server: socket.socket) -> None:
        for _ in range(3):
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x00" * 8 + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises(DamagedCheckpoint, match="not a message"):
            RemoteShard(f"127.0.0.1:{server.getsockname()[1]}", "/ram/step-00000001", KEY)
        thread.join()
    assert ReadReply().size_bytes == 0


# -- what stops nobody -----------------------------------------------------------------------------------------------------


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


def test_a_lease_survives_its_way_through_shared_memory(tmp_path: Path) -> None:
    word = LeaseWord(tmp_path / "control", create=True)
    for lease in (Lease(0, 0, None), Lease(1, 7, 0), Lease((1 << 24) - 1, (1 << 32) - 1, 254)):
        word.publish(lease)
        assert LeaseWord(tmp_path / "control").read() == lease
    with pytest.raises(ValueError, match="does not fit"):
        word.publish(Lease(1 << 24, 1, 0))


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
    copying.finish(held, documents, daemon.durable, 1)
    verify(daemon.durable / "step-00000001")


def test_a_plain_user_of_the_package_pays_for_neither_torch_nor_messages() -> None:
    heavy = ("torch", "zarr", "numpy", "msgspec", "asyncio", "tenacity")
    code = f"import sys, checkpoint; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
