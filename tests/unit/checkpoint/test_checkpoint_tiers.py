"""Snapshots on their way through the tiers, with real daemons and ranks: whatever dies, a whole step is found again."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemon_lab import Lab
from soak import soaked

from checkpoint import points, steps, verify

AT_THE_DAEMON = points.POINTS[points.POINTS.index("seal_begun") :]
COMMITTING = (
    "manifest_written",
    "manifest_durable",
    "directories_durable",
    "fence_checked",
    "renamed",
    "published",
    "pruned_by_name",
    "unlinked",
)


ALL = ("ram", "nvme", "durable")
REACHED_S = 120.0  # a point that a daemon comes by at every step, on a machine that is busy


def test_a_step_goes_through_all_tiers(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    assert [said[0] for said in nodes.begin()] == [0, 0]
    for step in range(1, 7):
        assert nodes.step(step, ALL if step % 3 == 0 else ("ram",))
        if step % 3 == 0:  # what has not gone on when the next one comes would be dropped
            nodes.wait_durable(step)
            nodes.wait(lambda step=step: nodes.reported("snapshot", "nvme") == step, "the disk")
    verify(nodes.root / "step-00000006")
    assert nodes.reported("snapshot", "ram") == 6
    for node in nodes.nodes:
        assert steps(node.tier_root("nvme")) == [3, 6]
        nodes.wait(lambda node=node: steps(node.tier_root("nvme") / f"replica-{1 - node.index}") == [3, 6], "replicas")


def test_a_daemon_takes_seals_copies_flushes_and_commits_without_torch_zarr_or_numpy(lab: Callable[..., Lab]) -> None:
    nodes = lab(programs=True)
    nodes.begin()
    assert nodes.step(1, ALL)
    nodes.wait_durable(1)
    for node in nodes.nodes:
        nodes.wait(lambda node=node: steps(node.tier_root("nvme") / f"replica-{1 - node.index}") == [1], "replicas")
    verify(nodes.root / "step-00000001")
    for node in nodes.nodes:
        imported = {line.rpartition("|")[2].strip() for line in node.imports.read_text().splitlines()}
        assert {"checkpoint.daemon.buffers", "checkpoint.tiers.copying", "checkpoint.verification"} <= imported
        assert not {"torch", "zarr", "numpy"} & {name.partition(".")[0] for name in imported}


def test_dead_workers_go_on_from_memory(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    for step in (1, 2, 3):
        assert nodes.step(step)
    nodes.end_workers()  # a moment after the last of them has copied: the daemons have the bytes
    assert [(said[0], said[1]) for said in nodes.begin()] == [(3, "ram"), (3, "ram")]
    assert nodes.step(4)


# In the middle of each job: one that seals, copies, holds a replica, flushes, shares, commits or forgets.
ONE_OF_EACH_JOB = (
    ("seal_described", True),
    ("half_of_copy_written", False),
    ("replica_held", True),
    ("flush_written", False),
    ("finish_begun", True),
    ("manifest_durable", False),
    ("renamed", True),
    ("shard_forgotten", False),
)


def each_point_both_ways() -> Iterator[Any]:
    """Parameters: each point where a daemon dies, alone or with all others; one of each job, and all others in the soak."""
    for point in [*AT_THE_DAEMON, *COMMITTING]:
        for all_die in (False, True):
            name = f"{point}-{'all' if all_die else 'it alone'}"
            marks = () if (point, all_die) in ONE_OF_EACH_JOB else pytest.mark.soak
            yield pytest.param(point, all_die, id=name, marks=marks)


def test_a_point_of_each_job_is_in_the_first_tier() -> None:
    jobs = {point.partition("_")[0] for point in AT_THE_DAEMON} - {"sealed", "half"}
    found = {point.removeprefix("half_of_").partition("_")[0] for point, _ in ONE_OF_EACH_JOB}
    assert jobs < found
    assert found - jobs <= {point.partition("_")[0] for point in COMMITTING}


def half_copied(nodes: Lab) -> list[str]:
    """Directories of steps on the tiers of nodes that are not finished, those of replicas too."""
    unfinished = re.compile(r"step-\d{8}\.tmp")
    tiers = (nodes.base / tier for tier in ("ram", "nvme"))
    return [name for tier in tiers for _, names, _ in os.walk(tier) for name in names if unfinished.fullmatch(name)]


@pytest.mark.parametrize(("point", "all_die"), list(each_point_both_ways()))
def test_a_daemon_killed_at_any_point_loses_nothing_that_was_reported(lab: Callable[..., Lab], point: str, all_die: bool) -> None:
    nodes = lab()
    nodes.begin()
    for step in (1, 2, 3):
        assert nodes.step(step, ALL if step == 3 else ("ram",))
    nodes.wait_durable(3)
    nodes.restart_daemons = False
    nodes.nodes[0].stop()
    nodes.nodes[0].start(point)
    nodes.wait(lambda: nodes.nodes[0].inventoried, "inventory")
    step, deadline = 3, time.monotonic() + REACHED_S
    while nodes.deaths == 0 and time.monotonic() < deadline:
        step += 1
        nodes.step(step, ALL, wait_s=1.0)  # of a daemon that is dead there comes no buffer
        nodes.pump(0.02)
    assert nodes.deaths == 1, "the point was never reached"
    reported = nodes.reported("committed", "durable")
    held = nodes.reported("snapshot", "ram")
    nodes.restart_daemons = True
    if all_die:
        nodes.kill()
        nodes.boot()
    else:
        nodes.nodes[0].start()
        nodes.end_workers()
    found = nodes.begin()
    assert found[0][0] == found[1][0] >= max(reported, held if not all_die else reported)
    assert found[0][2] == []  # nothing damaged was met on the way
    last = found[0][0] + 1
    while not nodes.step(last, ALL):
        last += 1
    nodes.wait_durable(last)
    for each in steps(nodes.root):
        verify(nodes.root / f"step-{each:08d}")
    left = {path.name for path in nodes.root.iterdir() if path.is_dir() and path.name.startswith("step-") and "." in path.name}
    assert not {name for name in left if ".tmp" in name}
    nodes.wait(lambda: not half_copied(nodes), "what was half copied is gone")


@pytest.mark.parametrize("point", [soaked("snapshot_acquired"), "snapshot_copied", "snapshot_reported"])
def test_a_worker_killed_while_it_copies_leaves_the_step_before(lab: Callable[..., Lab], point: str) -> None:
    nodes = lab()
    nodes.begin()
    for step in (1, 2):
        assert nodes.step(step)
    nodes.end_workers()
    nodes.begin(armed=point)
    assert not nodes.step(3)
    nodes.end_workers()
    found = nodes.begin()
    # What the daemon was told of is whole, whoever has died since.
    assert found[0][0] == (3 if point == "snapshot_reported" else 2)
    assert nodes.step(4)


@pytest.mark.parametrize("kills", [5, soaked(100)])
def test_whatever_is_killed_at_random_moments_a_whole_step_is_found(lab: Callable[..., Lab], kills: int) -> None:
    seed = random.randrange(1 << 30)
    dice = random.Random(seed)
    nodes = lab()
    nodes.begin()
    step = 0
    for number in range(kills):
        begun = len(nodes.events)  # what was taken before the last kill may have been lost with a node's memory
        for _ in range(dice.randrange(1, 6)):
            step += 1
            nodes.step(step, (*tuple(dice.sample(ALL[1:], dice.randrange(3))), "ram"))
        deadline = time.monotonic() + dice.random() * 0.08
        while time.monotonic() < deadline:
            nodes.pump(0.001)
        reported, newest = nodes.reported("committed", "durable"), nodes.reported("snapshot", "ram", begun)
        victim = dice.choice(["workers", "daemon", "node", "all"])
        if victim == "workers":
            nodes.end_workers()
        elif victim == "all":
            nodes.kill()
            nodes.boot()
        else:
            index = dice.randrange(2)
            nodes.nodes[index].stop()
            if victim == "node":
                nodes.forget_node(index)
            nodes.nodes[index].start()
            nodes.end_workers()
        found = nodes.begin()
        why = f"seed {seed}, round {number}: {victim} killed at step {step}"
        assert found[0][0] == found[1][0] >= reported, why
        if victim in ("workers", "daemon"):
            assert found[0][0] >= newest, why
        assert found[0][2] == [], why
        step = found[0][0]


def test_a_node_whose_memory_and_disk_are_gone_gets_its_shard_from_its_buddy(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    for step in (1, 2, 3, 4):
        assert nodes.step(step, ("ram", "nvme") if step == 2 else ("ram",))
    nodes.wait((nodes.nodes[0].tier_root("ram") / "replica-1/step-00000004/part.json").exists, "the replica")
    nodes.end_workers()
    nodes.nodes[1].stop()
    nodes.forget_node(1)
    nodes.nodes[1].start()
    assert [(said[0], said[1]) for said in nodes.begin()] == [(4, "ram"), (4, "ram")]


def test_the_last_step_is_taken_again_by_all_where_one_node_has_left_it_out(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    for step in (1, 2):
        assert nodes.step(step)
    nodes.wait(lambda: nodes.reported("snapshot", "ram") == 2, "both steps in memory")
    assert nodes.nodes[1].daemon is not None
    pid = nodes.nodes[1].daemon.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert nodes.step(3)  # into the buffer that is leased already; there will be no other
    later = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
    later.start()
    assert nodes.step(4, wait_s=0.0)
    later.join()
    nodes.wait(lambda: nodes.reported("snapshot", "ram") == 4, "the step that was left out")
    nodes.end_workers()
    assert [said[0] for said in nodes.begin()] == [4, 4]


def test_a_snapshot_with_the_bytes_of_the_one_before_is_refused(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    assert nodes.step(1)
    nodes.wait(lambda: nodes.reported("snapshot", "ram") == 1, "the first one on both nodes")
    assert nodes.step(2, changed=False)  # a worker that copies what it had copied before
    nodes.wait(lambda: any("same bytes" in str(e.fields.get("detail")) for e in nodes.events), "the refusal")
    nodes.end_workers()
    assert nodes.begin()[0][0] == 1


def test_a_damaged_shard_is_refused_and_its_replica_used(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    for step in (1, 2):
        assert nodes.step(step)
    nodes.wait((nodes.nodes[0].tier_root("ram") / "replica-1/step-00000002/part.json").exists, "the replica")
    nodes.end_workers()
    path = nodes.nodes[1].tier_root("ram") / "step-00000002/model/weight/c.0.0"
    data = bytearray(path.read_bytes())
    data[-4096] ^= 1
    path.write_bytes(data)
    assert [(said[0], said[2]) for said in nodes.begin()] == [(2, []), (2, [])]


def test_a_slow_durable_tier_takes_the_newest_step_and_drops_what_is_superseded(lab: Callable[..., Lab]) -> None:
    nodes = lab(1, rate=3_000.0, buffers=3)  # seconds for each of them, so that steps are faster on a busy machine, too
    nodes.begin()
    taken = [nodes.step(step, ("ram", "durable")) for step in range(1, 30)]
    assert all(taken)  # one buffer is being flushed, the two others take turns
    nodes.wait_durable(2)
    nodes.save_newest()
    nodes.wait(lambda: not nodes.core.behind, "the newest step")
    assert steps(nodes.root)[-1] == 29 and len(steps(nodes.root)) <= 3
    committed = [e.fields["step"] for e in nodes.events if e.event == "committed"]
    assert committed == sorted(committed) and len(committed) < 20


def aside_in(nodes: Lab) -> list[str]:
    return sorted(path.name for path in nodes.root.glob("step-*.rolled-back-*"))


def nothing_newer(nodes: Lab, step: int) -> bool:
    """Whether no daemon holds anything beyond a step."""
    roots = [node.tier_root(name) for node in nodes.nodes for name in ("ram", "nvme")]
    return all(found <= step for root in roots for where in (root, *root.glob("replica-*")) for found in steps(where))


def saved_up_to_6(nodes: Lab) -> None:
    """Steps 1 to 6 in memory, 2, 4 and 6 on all tiers and with the buddies."""
    for step in range(1, 7):
        assert nodes.step(step, ALL if step % 2 == 0 else ("ram",))
        if step % 2 == 0:
            nodes.wait_durable(step)
            nodes.wait(lambda step=step: nodes.reported("snapshot", "nvme") == step, "the disk")


@pytest.mark.alone
def test_a_roll_back_leaves_nothing_newer_on_any_tier_and_the_same_steps_can_be_saved_again(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    saved_up_to_6(nodes)
    nodes.roll_back(2)
    nodes.end_workers()
    assert [said[0] for said in nodes.begin()] == [2, 2]
    assert aside_in(nodes) == ["step-00000004.rolled-back-1", "step-00000006.rolled-back-1"]
    assert steps(nodes.root) == [2]
    nodes.wait(lambda: nothing_newer(nodes, 2), "daemons have deleted what is void")
    rejected = [(e.fields["step"], e.fields["tier"]) for e in nodes.events if e.event == "checkpoint_rejected"]
    assert {step for step, _ in rejected} >= {4, 6}
    assert nodes.step(3, ALL)
    assert nodes.step(4, ALL)
    nodes.wait(lambda: 4 in steps(nodes.root), "step 4, computed anew, is durable")
    verify(nodes.root / "step-00000004")


def test_a_daemon_that_dies_before_it_has_cleared_what_is_void_brings_nothing_back(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    saved_up_to_6(nodes)
    nodes.roll_back(2)
    nodes.end_workers()
    for node in nodes.nodes:
        node.stop()
        node.start("shard_forgotten")
    assert [said[0] for said in nodes.begin()] == [2, 2]
    assert nodes.deaths == 2
    nodes.end_workers()
    assert [said[0] for said in nodes.begin()] == [2, 2]
    nodes.wait(lambda: nothing_newer(nodes, 2), "daemons have deleted what is void")


def test_a_driver_that_dies_in_the_middle_of_a_roll_back_is_followed_by_one_that_knows_of_it(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    saved_up_to_6(nodes)
    nodes.roll_back(2)
    nodes.kill()  # nothing was cleared yet
    nodes.boot()
    assert [said[0] for said in nodes.begin()] == [2, 2]
    assert steps(nodes.root) == [2]
    nodes.kill()
    nodes.boot()
    assert [said[0] for said in nodes.begin()] == [2, 2]
    assert nodes.step(3)


def test_a_snapshot_that_arrives_after_the_roll_back_is_void_as_well(lab: Callable[..., Lab]) -> None:
    nodes = lab()
    nodes.begin()
    saved_up_to_6(nodes)
    nodes.roll_back(2)
    nodes.step(7)  # the ranks do not know of it yet
    nodes.end_workers()
    assert [said[0] for said in nodes.begin()] == [2, 2]
