"""Ranks of one node that take snapshots into the same buffers: a real daemon, a real group, and every order in which they come."""

import errno
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from checkpoint_processes import Child
from lone_daemon import PATIENCE_S, LoneDaemon

from checkpoint import LocalShard, Snapshots, points
from checkpoint.protocol import Held, Retain
from checkpoint.tiers.lease import NodeAgreement, attempt_of

ROWS = 8
WAITS = {"wait_s": PATIENCE_S}
RAM = frozenset(["ram"])


def rank_main(pipe: Connection, store: str, path: str, rank: int, count: int) -> None:
    """A rank with its rows of an array: does what it is told, and says what came of it."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)

    def rows(step: int) -> list[LocalShard]:
        data = torch.full((ROWS, 64), float(step))
        return [LocalShard("model/weight", (ROWS * count, 64), (ROWS * rank, 0), data, (ROWS, 64))]

    snapshots = Snapshots(Path(path))
    snapshots.start(rows(0))
    pipe.send(snapshots.ready())
    while (order := pipe.recv()) is not None:
        match order:
            case "left_out", copied:
                pipe.send(snapshots.left_out(copied))
            case "break", *_:
                points.arm("snapshot_acquired", no_room)
                pipe.send(None)
            case "announced others", *_:
                snapshots._leases.layout_changed = True  # as `start` leaves it until a buffer is seen that fits
                pipe.send(None)
            case "leave_out", step:
                pipe.send(snapshots.leave_out(step, RAM))
            case "take", step, options:
                pipe.send(snapshots.take(step, rows(step), {"step": step}, RAM, **options).copied)


def no_room() -> None:
    points.disarm()
    raise OSError(errno.ENOSPC, "no room for a page")


class Ranks:
    """The ranks of a node, each of which does something when the test says so."""

    def __init__(self, daemon: LoneDaemon, children: list[Child]) -> None:
        self.daemon, self.children = daemon, children

    def one(self, rank: int, *order: Any) -> Any:
        """What a rank does while the others do nothing."""
        self.children[rank].pipe.send(order)
        return self.children[rank].receive()

    def all(self, *order: Any) -> list[Any]:
        """What all do at once."""
        for child in self.children:
            child.pipe.send(order)
        return [child.receive() for child in self.children]

    def left_out(self, copied: Mapping[int, bool]) -> bool:
        """Whether all are to take the last step again. Args: copied: by rank, what it knows."""
        for rank, child in enumerate(self.children):
            child.pipe.send(("left_out", copied[rank]))
        (found,) = {child.receive() for child in self.children}
        return bool(found)

    def held(self, step: int) -> None:
        """Wait until a step is held, whole, and let go of what is older."""
        assert self.daemon.wait_for(Held).shard.key.step == step
        self.look(step)
        self.daemon.send(Retain(generation=1, tier="ram", steps=(step,), upto=step))

    def look(self, step: int) -> None:
        found = zarr.open_group(self.daemon.held_path(step), mode="r")["model/weight"][:]
        assert found.shape == (ROWS * len(self.children), 64) and (found == step).all()

    def fill(self) -> None:
        """Use both buffers, by the snapshots of steps 1 and 2."""
        for step in (1, 2):
            assert all(self.all("take", step, WAITS))
            assert self.daemon.wait_for(Held).shard.key.step == step

    def release(self) -> None:
        """The buffer of step 1 is free, and leased."""
        self.daemon.send(Retain(generation=1, tier="ram", steps=(2,), upto=2))
        self.daemon.wait_for_lease()


@contextmanager
def node(base: Path, count: int) -> Iterator[Ranks]:
    with LoneDaemon(base, buffers=2) as daemon, ExitStack() as stack:
        daemon.start()
        path = daemon.begin(1, ranks=count)
        children = [stack.enter_context(Child(rank_main, str(base / "store"), str(path), rank, count)) for rank in range(count)]
        assert all(child.receive() for child in children)
        yield Ranks(daemon, children)


def test_a_step_for_which_one_rank_found_no_buffer_is_taken_by_none_and_the_next_one_by_all(base: Path) -> None:
    with node(base, 2) as ranks:
        ranks.fill()
        assert not ranks.one(0, "take", 3, {}), "both buffers are in use"
        ranks.release()
        assert not ranks.one(1, "take", 3, WAITS), "it does not wait either"
        assert ranks.one(1, "take", 4, {}) and ranks.one(0, "take", 4, {})
        ranks.held(4)
        assert not ranks.left_out({0: True, 1: True})


def test_a_rank_that_leaves_a_step_out_by_itself_costs_that_step_alone(base: Path) -> None:
    with node(base, 2) as ranks:
        assert ranks.one(0, "take", 1, WAITS)
        ranks.one(1, "leave_out", 1)
        for step, first in ((2, 0), (4, 1)):
            assert ranks.one(first, "take", step, WAITS) and ranks.one(1 - first, "take", step, WAITS)
            ranks.held(step)
            ranks.one(1, "leave_out", step + 1)
            assert not ranks.one(0, "take", step + 1, WAITS)


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_have_used_one_lease_for_different_steps_agree_about_the_next_step_but_one(base: Path, first: int) -> None:
    """Both wrote down what they did at the same moment, and one of the two words was lost."""
    with node(base, 2) as ranks:
        ranks.fill()
        assert not ranks.one(0, "take", 3, {})
        ranks.release()
        NodeAgreement(ranks.daemon.word, 1).leave_out(attempt_of(99, 0))  # in place of step 3
        assert ranks.one(1, "take", 3, {})
        copied = {rank: ranks.one(rank, "take", 4, {}) for rank in (first, 1 - first)}
        if ranks.left_out(copied):
            assert all(ranks.all("take", 4, {**WAITS, "again": 1}))
        ranks.held(4)
        for step in range(5, 8):
            assert ranks.one(first, "take", step, WAITS) and ranks.one(1 - first, "take", step, WAITS)
            ranks.held(step)


def test_a_lease_whose_buffer_broke_before_all_had_seen_that_it_fits_is_given_back(base: Path) -> None:
    with node(base, 2) as ranks:
        assert all(ranks.all("take", 1, WAITS))
        ranks.held(1)
        ranks.daemon.wait_for_lease()
        ranks.one(1, "announced others")
        ranks.one(0, "break")
        assert not ranks.one(0, "take", 2, {})
        ranks.daemon.sync(1)
        assert not ranks.one(1, "take", 2, {}), "what was the buffer's layout is not known any more"
        taken = [step for step in range(3, 7) if all(ranks.all("take", step, {"wait_s": 2.0}))]
        assert taken, "no step is taken any more"
        ranks.held(taken[0])


def test_in_whatever_order_ranks_come_what_all_have_copied_is_held_whole(base: Path, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    with node(base, 3) as ranks:
        newest = 0
        for step in range(1, 40 * rounds):
            copied = []
            for rank in dice.sample(range(3), 3):
                if newest and dice.random() < 0.2:
                    ranks.daemon.send(Retain(generation=1, tier="ram", steps=(newest,), upto=newest))
                if dice.random() < 0.3:
                    ranks.daemon.sync(1)
                copied.append(ranks.one(rank, *(("leave_out", step) if dice.random() < 0.05 else ("take", step, {}))))
            if all(copied):
                assert ranks.daemon.wait_for(Held).shard.key.step == step, "what is left out is not held, and what is copied is"
                ranks.look(step)
                newest = step
        ranks.daemon.send(Retain(generation=1, tier="ram", steps=(newest,), upto=newest))
        assert all(ranks.all("take", 1000, WAITS)) or all(ranks.all("take", 1001, WAITS)), "they agree again"
        assert ranks.daemon.wait_for(Held).shard.key.step in (1000, 1001)
