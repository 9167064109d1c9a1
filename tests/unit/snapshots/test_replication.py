"""Buddies: whose replicas a node keeps, and when a snapshot has them all."""

from typing import Any

import pytest
from snapshot_course import Course, address, done, failed, promised, replicated, shard

from checkpoint.protocol import Cancel, Held, Replicate, Retain, SnapshotKey, StartJob
from resilient.outbox import Effect, Outbox
from resilient.snapshots import StoragePlan, TierPlan
from resilient.snapshots.catalog import Catalog
from resilient.snapshots.replication import buddies


@pytest.fixture
def course() -> Course:
    course = Course(replicas=True, buffers=3)
    course.resumed()
    return course


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 64])
def test_buddies_are_others_and_share_the_burden(nodes: int) -> None:
    found = buddies(nodes)
    if nodes == 1:
        assert found == (None,)
        return
    assert found == tuple((node + 1) % nodes for node in range(nodes))


@pytest.mark.parametrize("names", ["aaaabbbb", "abababab", "aabbccdd", "abcabcab", "aaabbc", "aaaab", "abbbbc", "aabb"])
def test_buddies_are_in_another_failure_domain_where_there_is_one(names: str) -> None:
    found = buddies(len(names), list(names))
    assert all(names[node] != names[buddy] for node, buddy in enumerate(found) if buddy is not None)
    smallest = min(len(names) - names.count(name) for name in names)
    assert max(found.count(node) for node in range(len(names))) == -(-max(map(names.count, names)) // smallest)


def test_nodes_of_the_same_domain_are_buddies_where_there_is_no_other() -> None:
    assert buddies(2, ["same", "same"]) == (1, 0)
    assert buddies(3, ["same"] * 3) == (1, 2, 0)


def all_replicated(course: Course, effects: list[Effect]) -> list[Effect]:
    requests = course.requests(Replicate, effects)
    return [effect for node, each in requests for effect in course.deliver(node, replicated(each, of=len(course.members)))]


def failed_replica(course: Course, step: int, *, unreachable: bool) -> list[dict[str, Any]]:
    """A snapshot's copies are asked for, and that of shard 1 does not come about; the faults that are reported of it."""
    course.effects.clear()
    for node, request in course.requests(Replicate, course.all_take(step)):
        course.deliver(node, failed(request, unreachable=unreachable) if request.shard == 1 else replicated(request))
    return course.events("fault")


def test_buddies_fetch_what_is_complete(course: Course) -> None:
    requests = course.requests(Replicate, course.all_take(1))
    assert [(node, each.shard, each.address, each.directory) for node, each in requests] == [
        (1, 0, address(0), "/ram/1"),
        (0, 1, address(1), "/ram/1"),
    ]


def test_the_ledger_says_when_all_of_a_snapshot_has_copies(course: Course) -> None:
    for node, request in course.requests(Replicate, course.all_take(1)):
        assert not course.events("replicated")
        course.deliver(node, replicated(request))
    assert course.events("replicated") == [{"step": 1, "tier": "ram"}]
    failed_replica(course, 2, unreachable=True)
    assert not course.events("replicated")  # of step 2 there is one copy


def test_the_snapshot_that_buddies_have_is_retained_while_they_fetch_the_next(course: Course) -> None:
    all_replicated(course, course.all_take(1))
    effects = course.all_take(2)
    assert {each.steps for _, each in course.requests(Retain, effects)} == {(1, 2)}


def test_what_became_complete_meanwhile_is_fetched_next_and_only_the_newest(course: Course) -> None:
    first = course.all_take(1)
    assert not course.requests(Replicate, [*course.all_take(2), *course.all_take(3)])
    effects = all_replicated(course, first)
    assert {each.key.step for _, each in course.requests(Replicate, effects)} == {3}


def test_a_buddy_does_not_wait_for_a_node_that_is_gone(course: Course) -> None:
    ((buddy, request),) = [each for each in course.requests(Replicate, course.all_take(1)) if each[1].shard == 1]
    course.core.hold()
    effects = course.do("lost", 1)
    assert [(node, each.job_id) for node, each in course.requests(Cancel, effects)] == [(buddy, request.job_id)]
    course.deliver(buddy, failed(request, "cancelled", unreachable=True, cancelled=True))
    assert not course.events("fault") and not course.events("replicated")


def test_a_shard_that_cannot_be_fetched_is_a_fault_of_storage_only_if_its_node_answers_or_stays_silent(course: Course) -> None:
    assert not failed_replica(course, 1, unreachable=True)
    assert [fault["kind"] for fault in failed_replica(course, 2, unreachable=True)] == ["storage"]
    course = Course(replicas=True, buffers=3)
    assert [fault["kind"] for fault in failed_replica(course, 1, unreachable=False)] == ["storage"]


def test_a_node_that_answers_again_is_not_reproached_with_an_old_silence(course: Course) -> None:
    assert not failed_replica(course, 1, unreachable=True)
    all_replicated(course, course.all_take(2))
    assert not failed_replica(course, 3, unreachable=True)


def test_replicas_that_thousands_of_nodes_cannot_make_name_eight_of_them() -> None:
    course = Course(300, replicas=True, buffers=3)
    course.resumed()
    for node, request in course.requests(Replicate, course.all_take(1)):
        course.deliver(node, failed(request))
    faults = course.events("fault")
    assert [len(fault["nodes"]) for fault in faults] == [1] * 8 + [8]
    assert "on 292 more nodes" in faults[-1]["detail"]


def test_a_round_does_not_wait_for_a_daemon_that_is_new(course: Course) -> None:
    course.all_take(1)
    course.new_daemon(1, shard(1, 1))
    assert not course.core._replication.rounds
    assert course.requests(Replicate, course.all_take(2))


def test_replicas_are_kept_in_another_failure_domain() -> None:
    course = Course(4, replicas=True, buffers=3, domains=("a", "a", "b", "b"))
    course.resumed()
    requests = course.requests(Replicate, course.all_take(1))
    assert {(each.shard, node) for node, each in requests} == {(0, 2), (1, 3), (2, 0), (3, 1)}


def test_what_is_not_of_the_nodes_of_today_is_not_replicated() -> None:
    course = Course(2, spares=1, replicas=True, buffers=3)
    course.stopped({0: [shard(9, 0)], 1: [shard(9, 1)]})
    course.begin(6, [1, 2])
    assert not course.requests(Replicate, course.resumed(9))
    assert course.core.newest == SnapshotKey(9, 5)


def test_a_single_node_has_no_buddy() -> None:
    course = Course(1, replicas=True, buffers=3)
    course.resumed()
    assert not course.requests(Replicate, course.all_take(1))


# -- one turn a step -----------------------------------------------------------------------------------------------------


def test_the_end_of_a_replication_sends_nothing_before_the_next_snapshot(course: Course) -> None:
    effects = course.all_take(1)
    for step in range(2, 5):
        assert not course.requests(Retain, all_replicated(course, effects))
        effects = course.all_take(step)
        assert {each.steps for _, each in course.requests(Retain, effects)} == {(step - 1, step)}


def test_what_replication_held_back_is_let_go_at_once_where_no_buffer_is_left(course: Course) -> None:
    course.all_take(1, wants=("scratch",))  # is being flushed, so that its buffer is read until the end of this
    first = course.effects[:]
    all_replicated(course, first)
    effects = course.all_take(2)
    assert {each.steps for _, each in course.requests(Retain, effects)} == {(1, 2)}
    all_replicated(course, effects)
    effects = course.all_take(3)
    assert {each.steps for _, each in course.requests(Retain, effects)} == {(2, 3)}  # and 1: no buffer for step 4
    effects = all_replicated(course, effects)
    assert {each.steps for _, each in course.requests(Retain, effects)} == {(3,)}  # 1 may be overwritten where it is flushed


def test_what_buddies_have_is_retained_through_a_restart_until_they_have_something_newer(course: Course) -> None:
    all_replicated(course, course.all_take(1))
    course.all_take(2)
    course.stopped({node: [shard(1, node), shard(1, 1 - node, replica=True), shard(2, node)] for node in (0, 1)})
    course.begin(6)
    effects = course.resumed(2)
    assert {each.steps for _, each in course.requests(Retain, effects)} == {(1, 2)}
    course.core.lost(1, Outbox())
    assert course.core.newest == SnapshotKey(1, 5)


def test_replicas_that_new_ones_take_the_place_of_are_not_promised_any_more() -> None:
    course = Course(3, replicas=True, buffers=3)
    course.resumed()
    requests = course.requests(Replicate, course.all_take(8))
    course.all_take(9)  # buddies are still at the step before
    older = [shard(9, number, of=3, generation=4, replica=True) for number in range(3)]
    course.new_daemon(2, shard(8, 2, of=3), shard(9, 2, of=3), *older)
    assert SnapshotKey(9, 4) in promised(course)
    effects = course.deliver(1, replicated(next(each for node, each in requests if node == 1), of=3))
    assert {each.key for _, each in course.requests(Replicate, effects)} == {SnapshotKey(9, 5)}
    assert promised(course) == [SnapshotKey(9, 5), SnapshotKey(8, 5)]


def test_what_is_newer_than_the_step_that_was_gone_on_from_is_not_retained_for_its_replicas(course: Course) -> None:
    all_replicated(course, course.all_take(1))
    all_replicated(course, course.all_take(2))
    held = {node: [shard(step, number, replica=number != node) for step in (1, 2) for number in (0, 1)] for node in (0, 1)}
    course.stopped(held)
    course.begin(6)
    assert {each.steps for _, each in course.requests(Retain, course.resumed(1))} == {(1,)}


# -- nodes that hold the same --------------------------------------------------------------------------------------------


class Hybrid(Course):
    """Of the nodes, those that are `shards` apart hold the same."""

    def __init__(self, nodes: int, shards: int, **options: Any) -> None:
        self.shards = shards
        super().__init__(nodes, buffers=3, replicas=True, **options)
        self.resumed()

    def taken(self, node: int, step: int, *, wants: tuple[str, ...] = (), again: int = 0) -> list[Effect]:
        number = self.members.index(node) % self.shards
        held = shard(step, number, of=self.shards, generation=self.generation)
        return self.deliver(node, Held(generation=self.generation, shard=held, wants=wants, again=again))


def test_no_copy_is_made_of_what_another_node_holds_and_the_ledger_says_that_it_is_there_twice() -> None:
    course = Hybrid(4, 2)
    assert not course.requests(Replicate, course.all_take(1))
    assert [each["step"] for each in course.events("replicated")] == [1]


def test_a_step_that_one_of_two_nodes_has_taken_is_not_complete_but_can_be_gone_on_from() -> None:
    course = Hybrid(4, 2)
    course.all_take(1)
    for node in (0, 1, 2):
        course.taken(node, 2)
    assert [each["step"] for each in course.events("snapshot")] == [1]
    course.do("lost", 3)
    assert course.core.newest == SnapshotKey(2, course.generation)


def test_the_loss_of_a_node_leaves_all_to_the_one_that_holds_the_same() -> None:
    course = Hybrid(4, 2)
    course.all_take(1)
    course.do("lost", 0)
    assert course.core.newest == SnapshotKey(1, course.generation)
    course.do("lost", 2)
    assert course.core.newest is None


def test_a_snapshot_of_nodes_that_hold_the_same_is_flushed_once() -> None:
    course = Hybrid(4, 2)
    requests = course.requests(StartJob, course.all_take(1, wants=("scratch",)))
    assert [(node, each.shard) for node, each in requests] == [(0, 0), (1, 1)]


def test_with_one_group_left_buddies_make_copies_again() -> None:
    course = Hybrid(4, 2)
    course.all_take(1)
    course.do("lost", 2)
    course.do("lost", 3)
    course.begin(course.generation + 1, [0, 1])
    course.resumed(1)
    requests = course.requests(Replicate, course.all_take(2))
    assert [(node, each.shard) for node, each in requests] == [(1, 0), (0, 1)]


def test_on_a_slower_tier_a_buddy_copies_what_one_node_has_written() -> None:
    course = Hybrid(4, 2, others=(TierPlan("nvme", 2, replicas=True),))
    copies = course.requests(StartJob, course.all_take(1, wants=("nvme",)))
    effects = [effect for node, each in copies for effect in course.deliver(node, done(each))]
    assert [(node, each.shard, each.tier) for node, each in course.requests(Replicate, effects)] == [(1, 0, "nvme"), (2, 1, "nvme")]


def test_a_lost_member_is_asked_for_no_copy_although_others_complete_a_step_without_it() -> None:
    course = Hybrid(4, 2, others=(TierPlan("nvme", 1, True),))
    copies = course.jobs("copy", course.all_take(1, wants=("nvme",)))
    for node in (2, 3):
        course.do("lost", node)
    assert not course.requests(Replicate, course.all_done(copies))
    assert course.core._catalog.complete["nvme"] == [SnapshotKey(1, course.generation)]


def test_owners_are_counted_as_they_come_and_go() -> None:
    plan = StoragePlan(TierPlan("ram", 1), (), TierPlan("scratch", 3), 2)
    catalog = Catalog(plan)
    counts = []
    for change in (
        lambda: catalog.add(0, shard(1, 0)),
        lambda: catalog.add(1, shard(1, 0)),
        lambda: catalog.add(1, shard(1, 0)),  # once more
        lambda: catalog.add(1, shard(1, 0, replica=True)),  # for another one by now
        lambda: catalog.add(2, shard(1, 1)),
        lambda: catalog.lose(1),
        lambda: catalog.lose(0),
    ):
        change()
        counts.append(catalog.snapshots[SnapshotKey(1, 5)].owners["ram"])
    assert counts == [1, 2, 2, 1, 2, 2, 1]
