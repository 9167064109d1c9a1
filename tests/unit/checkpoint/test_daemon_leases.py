"""Which buffers a snapshot daemon leases, to whom and when, and what becomes of a step for which there was none."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from daemon_worker import job, local_shards, take, worker
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import Snapshots, points
from checkpoint.daemon.buffers import Buffers
from checkpoint.framing import encode
from checkpoint.protocol import Flushed, Held, JobFailed, Retain, Skipped, SnapshotKey, TierTrouble
from checkpoint.tiers import cadence, daemon_link
from checkpoint.tiers.lease import Lease, LeaseWord, buffer_path, layout_of
from checkpoint.tiers.session import SOCKET
from checkpoint.tiers.snapshots import all_have_it
from checkpoint.worker_news import StepSkipped


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


def test_a_step_of_which_the_daemon_has_taken_no_report_is_left_out_until_it_has(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = worker(daemon, 1)
    monkeypatch.setattr(daemon_link, "REPORT_S", 0.1)
    daemon.process.send_signal(signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others, contextlib.suppress(BlockingIOError):
        while True:  # until no report has room any more
            others.sendto(b"\n", socket.MSG_DONTWAIT, str(daemon.directory / SOCKET))
    copied = snapshots.take(1, local_shards(1), {}, frozenset(["ram"])).copied
    assert copied and snapshots.left_out(copied)
    daemon.process.send_signal(signal.SIGCONT)
    daemon.sync(1)
    assert not snapshots.left_out(copied)
    assert daemon.wait_for(Held).shard.key == SnapshotKey(1, 1)


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
    assert snapshots.take(2, local_shards(2), {"step": 2}, frozenset(["ram"]), wait_s=PATIENCE_S, again=1).copied
    assert daemon.wait_for(Held).again
    if told == "after it is sealed":
        daemon.send(left_out)
        daemon.sync(1)
    daemon.send(job("flush", "durable", 2))
    daemon.sync(1)
    assert daemon.wait_for(Flushed).key == SnapshotKey(2, 1)
    daemon.send(Retain(generation=1, tier="ram", steps=(1,), upto=2))  # something newer is complete
    assert take(daemon, snapshots, 3).shard.key.step == 3


@pytest.mark.parametrize(("again", "kept"), [((), True), ((0,), True), ((1,), False)])
def test_a_step_taken_again_is_kept_unless_it_was_left_out_once_more(
    daemon: LoneDaemon, again: tuple[int, ...], kept: bool
) -> None:
    snapshots = worker(daemon, 1)
    take(daemon, snapshots, 1)
    assert snapshots.take(2, local_shards(2), {"step": 2}, frozenset(["ram"]), wait_s=PATIENCE_S, again=1).copied
    assert daemon.wait_for(Held).again == 1
    daemon.send(Retain(generation=1, tier="ram", steps=(1,), upto=1, left_out=(2,), again=again))
    daemon.sync(1)
    assert (daemon.word.read().buffer is None) == kept


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
    for again in (0, 1):
        assert not snapshots.take(3, local_shards(3), {}, frozenset(["ram", "durable"]), again=again).copied
        skipped = daemon.wait_for(Skipped)
        assert (skipped.again, skipped.wants) == (again, ("durable", "ram"))


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


def test_a_lease_survives_its_way_through_shared_memory(tmp_path: Path) -> None:
    word = LeaseWord(tmp_path / "control", create=True)
    for lease in (Lease(0, 0, None), Lease(1, 7, 0), Lease((1 << 24) - 1, (1 << 32) - 1, 254)):
        word.publish(lease)
        assert LeaseWord(tmp_path / "control").read() == lease
    with pytest.raises(ValueError, match="does not fit"):
        word.publish(Lease(1 << 24, 1, 0))


@pytest.mark.parametrize(
    ("reported", "whole"),
    [
        ([(True, 0, 217), (True, 0, 217)], True),
        ([(True, 0, 217), (False, 0, 217)], False),
        ([(True, 0, 217), (True, 0, 219)], False),  # one had left out the step before, and had that lease still
        ([(True, 0, 217), (True, 0, 217), (True, 2, 9), (True, 2, 9)], True),
        ([(True, 0, 217), (True, 0, 217), (True, 2, 9), (True, 2, 11)], False),
    ],
)
def test_a_step_that_ranks_of_a_node_copied_with_different_leases_is_taken_again(
    reported: list[tuple[bool, int, int]], whole: bool
) -> None:
    assert all_have_it(reported) == whole
