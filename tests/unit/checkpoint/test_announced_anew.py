"""Workers that announce other arrays while they train: a real daemon makes buffers for these, and keeps what it holds."""

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots
from checkpoint.agreement import Ranks
from checkpoint.framing import encode
from checkpoint.protocol import BeginSession, Held, Retain, Skipped, TierTrouble
from checkpoint.saving import agree, spec_of
from checkpoint.tiers import blueprint
from checkpoint.tiers.lease import LeaseWord, buffer_path, layout_of
from checkpoint.tiers.mapped import WritePlan
from checkpoint.tiers.session import CONTROL, SOCKET
from checkpoint.worker_news import LayoutAnnounced


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


# -- ranks that announce different arrays for a while --------------------------------------------------------------------


class Two:
    """Two ranks of one node, as far as they announce what they will write; each has one half of an array's rows."""

    def __init__(self, daemon: LoneDaemon) -> None:
        self.daemon = daemon
        self.begin()

    def begin(self) -> None:
        self.daemon.send(BeginSession(generation=1, node_rank=0, nodes=1, first_rank=0, ranks=2))
        self.daemon.sync(1)

    def write(self, rank: int, rows: int) -> str:
        """What a rank writes down before it says so; the digest of its arrays."""
        whole = LocalShard("model/weight", (2 * rows, 64), (0, 0), torch.zeros(2 * rows, 64), (rows, 64))
        layout = agree(Ranks(None), [spec_of(whole)])
        digest = blueprint.arrays_digest(layout.arrays)
        slots: dict[str, list[int]] = {}
        for shard, first, count in WritePlan.of(whole, layout.arrays[0], 0).chunk_runs:
            slots.setdefault(shard.path, []).extend(slot for slot in range(first, first + count) if slot % 2 == rank)
        blueprint.write_arrays(self.daemon.directory, layout.arrays, layout.documents)
        blueprint.write_slots(self.daemon.directory, rank, 1, digest, slots)
        return digest

    def say(self, rank: int, rows: int) -> None:
        news = LayoutAnnounced(generation=1, rank=rank, digest=self.write(rank, rows))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(encode(news), str(self.daemon.directory / SOCKET))
        self.daemon.sync(1)

    def leased(self) -> bool:
        """Whether a buffer is, by now."""
        return LeaseWord(self.daemon.directory / CONTROL).read().buffer is not None


@pytest.mark.parametrize("first", [0, 1])
def test_buffers_are_made_once_all_ranks_have_announced_the_same(daemon: LoneDaemon, first: int) -> None:
    ranks = Two(daemon)
    ranks.say(first, 8)
    ranks.say(1 - first, 24)  # the first had no room to say that it writes others from now on
    assert not ranks.leased()
    ranks.say(first, 24)
    daemon.wait_for_lease()
    ranks.say(first, 16)
    assert not ranks.leased(), "it is taken back, for nobody writes that any more"
    ranks.say(1 - first, 16)
    daemon.wait_for_lease()
    assert not [news for news in daemon.news if isinstance(news, TierTrouble)]


def test_a_rank_that_has_written_down_others_and_says_so_in_a_moment_is_no_trouble(daemon: LoneDaemon) -> None:
    ranks = Two(daemon)
    ranks.say(0, 8)
    ranks.write(0, 24)
    ranks.say(1, 8)  # all have announced the same, and one of them writes something else by now
    ranks.say(0, 24)
    ranks.say(1, 24)
    daemon.wait_for_lease()
    daemon.sync(1)
    assert not [news for news in daemon.news if isinstance(news, TierTrouble)]


def test_a_daemon_that_begins_between_two_announcements_waits_for_the_second(base: Path) -> None:
    with LoneDaemon(base) as daemon:
        daemon.start()
        ranks = Two(daemon)
        ranks.say(0, 8)
        ranks.say(1, 8)
        daemon.wait_for_lease()
        ranks.write(0, 24)
    with LoneDaemon(base) as daemon:
        daemon.start()
        ranks = Two(daemon)
        assert not ranks.leased()
        ranks.say(1, 24)
        daemon.wait_for_lease()
        digest = ranks.write(1, 24)
        found = blueprint.read(daemon.directory, digest, [0, 1])
        assert layout_of(buffer_path(daemon.ram, daemon.wait_for_lease()[1])) == found.digest
