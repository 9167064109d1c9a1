"""When a snapshot is complete, which steps are left out, and what daemons may forget by that."""

import pytest
from snapshot_course import Course, address, shard

from checkpoint.protocol import Held, Inventory, Listening, NoRoom, Retain, Skipped, SnapshotKey, StartJob, Synced, TierTrouble
from resilient.protocol.candidates import Holder, unpack
from resilient.snapshots import TierPlan
from resilient.snapshots.left_out import OPEN_STEPS


@pytest.fixture
def course() -> Course:
    course = Course()
    course.resumed()
    return course


def test_a_snapshot_is_reported_once_every_node_holds_its_shard(course: Course) -> None:
    course.taken(0, 5)
    assert not course.events("snapshot")
    effects = course.taken(1, 5)
    assert course.events("snapshot") == [{"step": 5, "tier": "ram", "bytes": 200, "stall_s": 0.01, "write_s": 0.02}]
    assert {node: (each.steps, each.upto) for node, each in course.requests(Retain, effects)} == {0: ((5,), 5), 1: ((5,), 5)}


def test_nothing_is_forgotten_from_a_fault_until_the_ranks_go_on(course: Course) -> None:
    course.all_take(5)
    course.all_take(6)
    course.core.hold()
    effects = course.all_take(7)
    course.stopped({node: [shard(6, node), shard(7, node)] for node in (0, 1)})
    effects += course.begin(6)
    assert not course.requests(Retain, effects)
    assert {node for node, _ in course.requests(Retain, course.resumed(6))} == {0, 1}


def test_what_a_new_daemon_lists_counts_only_if_nobody_has_told_it_to_forget_that(course: Course) -> None:
    """It may have listed it before it was told; what it answers when it is asked is of after that."""
    course.all_take(5)
    course.all_take(6)
    course.core.hold()
    course.new_daemon(1, shard(5, 1), shard(6, 1))
    course.stopped({0: [shard(5, 0), shard(6, 0)]})
    assert [candidate.key.step for candidate in unpack(course.core.candidates())] == [6]
    course.stopped({1: [shard(5, 1), shard(6, 1)]})
    assert [candidate.key.step for candidate in unpack(course.core.candidates())] == [6, 5]


def test_a_snapshot_that_became_complete_while_nothing_is_forgotten_can_be_gone_on_from(course: Course) -> None:
    course.core.hold()
    course.all_take(7)
    assert course.core.newest == SnapshotKey(7, 5)


def test_news_of_a_shard_that_the_inventory_has_listed_already_mean_nothing(course: Course) -> None:
    course.all_take(9)
    course.stopped({0: [shard(9, 0)], 1: [shard(9, 1)]})
    course.begin(6)
    course.deliver(0, Held(generation=5, shard=shard(9, 0)))
    course.resumed(9)
    course.all_take(10)
    course.all_take(11)
    assert [event["step"] for event in course.events("snapshot")] == [9, 10, 11]


def test_a_shard_that_arrives_twice_is_counted_once(course: Course) -> None:
    course.taken(0, 5)
    course.taken(0, 5)
    assert not course.events("snapshot")
    course.taken(1, 5)
    assert course.core.cost(SnapshotKey(5, 5)) == (200, 0.01)


def test_what_a_skipped_step_leaves_is_let_go_but_not_the_steps_before_it(course: Course) -> None:
    retain = [each for _, each in course.requests(Retain, course.skips(1, 8))]
    assert retain
    assert all(each.upto < 7 and each.left_out == (8,) for each in retain)
    course.all_take(7)
    assert [event["step"] for event in course.events("snapshot")] == [7]


def test_a_step_that_all_nodes_skip_costs_one_request_a_node() -> None:
    course = Course(64)
    course.resumed()
    effects = [effect for node in course.members for effect in course.skips(node, 8)]
    assert len(course.requests(Retain, effects)) == 64


def test_a_step_that_was_skipped_in_an_earlier_generation_is_not_left_out_of_this_one(course: Course) -> None:
    course.begin(6)
    course.resumed()
    assert not course.deliver(0, Skipped(generation=5, step=8, reason="no buffer was free"))
    course.all_take(8)
    assert [event["step"] for event in course.events("snapshot")] == [8]


def test_a_step_of_which_a_node_never_reports_is_let_go_once_it_has_reported_several_later_ones(course: Course) -> None:
    for step in (7, 8, 9, 10):
        course.taken(0, step)
    for step in (8, 9):
        course.skips(1, step)
    assert all(7 not in each.left_out for _, each in course.requests(Retain))
    effects = course.skips(1, 10)
    assert course.requests(Retain, effects)[-1][1].left_out == (7, 8, 9, 10)


def test_a_shard_that_comes_after_all_were_told_to_do_without_its_step_does_not_count(course: Course) -> None:
    course.taken(0, 7)
    for step in (8, 9, 10):
        effects = course.skips(1, step)
    assert 7 in course.requests(Retain, effects)[-1][1].left_out  # so that node 0 may overwrite it
    course.taken(1, 7)
    assert not course.events("snapshot")
    assert course.core.newest is None
    course.all_take(11)
    assert [event["step"] for event in course.events("snapshot")] == [11]


def test_a_shard_of_a_step_before_the_newest_complete_one_does_not_count(course: Course) -> None:
    course.taken(0, 7)
    course.all_take(8)
    course.taken(1, 7)
    assert [each.key.step for each in unpack(course.core.candidates())] == [8]


def test_a_step_that_was_left_out_and_taken_again_counts(course: Course) -> None:
    course.taken(0, 7)
    course.skips(1, 7)
    for node in (0, 1):
        effects = course.taken(node, 7, again=1)
    assert [event["step"] for event in course.events("snapshot")] == [7]
    assert course.requests(Retain, effects)[-1][1].left_out == ()


def test_a_step_that_is_taken_again_is_retained_from_its_first_shard_on(course: Course) -> None:
    course.skips(1, 7)
    effects = course.taken(0, 7, again=1)
    assert {(node, each.left_out) for node, each in course.requests(Retain, effects)} == {(0, ()), (1, ())}


def test_what_a_node_says_of_the_time_before_a_step_was_taken_again_leaves_nothing_out(course: Course) -> None:
    course.skips(0, 7)
    course.taken(0, 7, again=1)
    assert not course.requests(Retain, course.skips(1, 7))
    course.taken(1, 7, again=1)
    assert [event["step"] for event in course.events("snapshot")] == [7]


def test_a_step_that_a_node_cannot_take_again_either_is_left_out(course: Course) -> None:
    course.skips(1, 7)
    course.taken(0, 7, again=1)
    effects = course.skips(1, 7, again=1)
    assert {(node, each.left_out) for node, each in course.requests(Retain, effects)} == {(0, (7,)), (1, (7,))}
    assert not course.core._catalog.snapshots
    course.all_take(8)
    assert [event["step"] for event in course.events("snapshot")] == [8]


def test_a_step_that_could_not_be_taken_again_counts_once_it_is_taken_another_time(course: Course) -> None:
    course.skips(1, 7)
    course.skips(1, 7, again=1)
    effects = course.taken(0, 7, again=1)
    assert {each.left_out for _, each in course.requests(Retain, effects)} == {(7,)}, "node 1 will not have it"
    effects = course.taken(0, 7, again=2)
    assert {(node, each.left_out) for node, each in course.requests(Retain, effects)} == {(0, ()), (1, ())}
    course.skips(1, 7, again=1)  # late
    course.taken(1, 7, again=2)
    assert [event["step"] for event in course.events("snapshot")] == [7]


def test_daemons_are_told_how_often_a_step_was_taken_when_it_was_left_out(course: Course) -> None:
    course.skips(1, 6)
    course.taken(0, 7)
    course.skips(1, 7)
    course.taken(0, 7, again=1)
    effects = course.skips(1, 7, again=1)
    assert {(each.left_out, each.again) for _, each in course.requests(Retain, effects)} == {((6, 7), (0, 1))}


def test_what_a_new_daemon_does_not_have_is_let_go_by_the_others(course: Course) -> None:
    for step in (7, 8):
        course.taken(0, step)
    effects = course.new_daemon(1)
    assert {(node, each.left_out) for node, each in course.requests(Retain, effects)} == {(0, (7, 8)), (1, (7, 8))}


def test_a_step_whose_last_shard_only_the_inventory_of_a_new_daemon_lists_is_complete(course: Course) -> None:
    for step in (7, 8):
        course.taken(0, step)
    effects = course.new_daemon(1, shard(8, 1))
    assert [event["step"] for event in course.events("snapshot", effects)] == [8]
    assert (8,) in [each.steps for node, each in course.requests(Retain, effects) if node == 0]


def test_a_daemon_of_a_spare_that_is_new_leaves_no_step_out() -> None:
    course = Course(spares=1)
    course.resumed()
    course.taken(0, 7)
    course.new_daemon(2)
    course.taken(1, 7)
    assert [event["step"] for event in course.events("snapshot")] == [7]


def test_what_a_new_daemon_still_holds_although_it_may_be_forgotten_does_not_count(course: Course) -> None:
    course.all_take(7)
    course.all_take(8)  # 7 may be overwritten from now on
    for node in (0, 1):
        course.new_daemon(node, shard(7, node), shard(8, node))
    assert [each.key.step for each in unpack(course.core.candidates())] == [8]


def test_a_daemon_that_is_new_is_told_again_what_to_retain(course: Course) -> None:
    course.all_take(7)
    effects = course.new_daemon(1, shard(7, 1))
    assert [(node, each.steps, each.upto) for node, each in course.requests(Retain, effects)] == [(1, (7,), 7)]


def test_thousands_of_steps_of_which_none_becomes_whole_take_no_more_room_than_a_few(course: Course) -> None:
    for step in range(1, 5000):
        course.taken(0, step) if step % 2 else course.skips(0, step)
        effects = course.skips(1, step)
    assert len(course.requests(Retain, effects)[0][1].left_out) <= OPEN_STEPS
    assert not course.core._catalog.snapshots
    course.all_take(5000)
    assert [event["step"] for event in course.events("snapshot")] == [5000]


def test_what_never_becomes_whole_is_not_kept_in_mind(course: Course) -> None:
    for step in range(1, 300, 2):
        course.taken(0, step)
        course.all_take(step + 1)
    assert len(course.core._catalog.snapshots) <= 2


def test_news_of_a_node_that_is_gone_mean_nothing(course: Course) -> None:
    course.do("lost", 1)
    course.taken(0, 7)
    course.taken(1, 7)
    assert course.core.newest is None


def test_shards_that_cannot_be_are_refused(course: Course) -> None:
    for wrong in (shard(7, 2), shard(7, -1), shard(7, 0, tier="tape")):
        course.deliver(0, Held(generation=5, shard=wrong))
    course.taken(0, 8)
    course.deliver(1, Held(generation=5, shard=shard(8, 1, of=3)))
    assert course.core.newest is None


def test_what_is_not_for_the_snapshot_core_changes_nothing(course: Course) -> None:
    assert course.deliver(0, Synced(generation=5)) == []
    assert course.deliver(0, NoRoom(generation=5, size_bytes=1, places=("/dev/shm",))) == []


def test_candidates_are_the_same_for_all_newest_first_and_name_the_fastest_holder_first() -> None:
    course = Course(others=(TierPlan("nvme", 2),))
    nvme = [shard(8, node, tier="nvme") for node in (0, 1)]
    course.stopped({0: [nvme[0], shard(8, 0), shard(8, 1, replica=True), shard(9, 0)], 1: [nvme[1], shard(9, 1)]})
    newest, older = unpack(course.core.candidates())
    assert (newest.key, newest.tier, older.key, older.tier) == (SnapshotKey(9, 5), "ram", SnapshotKey(8, 5), "ram")
    assert newest.shards == ((Holder(0, address(0), "/ram/9"),), (Holder(1, address(1), "/ram/9"),))
    assert older.shards[1] == (Holder(0, address(0), "/ram/replica/8"), Holder(1, address(1), "/nvme/8"))
    course.do("lost", 0)
    assert unpack(course.core.candidates()) == ()


def test_the_tier_of_a_candidate_is_the_slowest_that_is_needed() -> None:
    course = Course(others=(TierPlan("nvme", 2),))
    course.stopped({0: [shard(8, 0)], 1: [shard(8, 1, tier="nvme")]})
    assert [each.tier for each in unpack(course.core.candidates())] == ["nvme"]


def test_there_are_no_more_than_six_candidates_and_they_are_packed_once() -> None:
    course = Course()
    course.stopped({node: [shard(step, node) for step in range(1, 9)] for node in (0, 1)})
    packed = course.core.candidates()
    assert [each.key.step for each in unpack(packed)] == [8, 7, 6, 5, 4, 3]
    assert course.core.candidates() is packed
    course.deliver(1, Listening(generation=5, address="10.0.0.1:4"))
    assert unpack(course.core.candidates())[0].shards[1][0].address == "10.0.0.1:4"


def test_a_spare_takes_over_with_the_replicas_of_the_node_that_is_gone() -> None:
    course = Course(spares=1)
    course.resumed()
    course.do("lost", 1)
    course.stopped({0: [shard(9, 0), shard(9, 1, replica=True)]})
    course.begin(6, [0, 2])
    (candidate,) = unpack(course.core.candidates())
    assert [holder.address for (holder,) in candidate.shards] == [address(0)] * 2
    assert course.core.newest == SnapshotKey(9, 5)


def test_a_snapshot_whose_node_is_gone_is_not_promised_until_the_node_returns(course: Course) -> None:
    course.all_take(5)
    course.core.hold()
    course.do("lost", 1)
    assert course.core.newest is None and course.core.candidates() == b"" and not course.core.may_start_without_fence
    course.core.inventory(1, Inventory(generation=5, address=address(1), shards=(shard(5, 1),)))
    assert course.core.newest == SnapshotKey(5, 5) and course.core.may_start_without_fence


def test_what_is_newer_than_the_step_that_was_gone_on_from_is_forgotten(course: Course) -> None:
    course.stopped({node: [shard(5, node), shard(9, node)] for node in (0, 1)})
    course.begin(6)
    effects = course.resumed(5)  # step 9 was found damaged
    assert course.core.newest == SnapshotKey(5, 5)
    assert {(each.steps, each.upto) for _, each in course.requests(Retain, effects)} == {((5,), 5)}
    assert not course.requests(StartJob, effects)


def missed(course: Course) -> list[tuple[int, str, str, int]]:
    return [(event["step"], event["tier"], event["reason"], event["count"]) for event in course.events("checkpoint_missed")]


def test_steps_that_a_slower_tier_does_without_are_told_ever_more_rarely(course: Course) -> None:
    for step in range(1, 10):
        for node in (0, 1):
            course.skips(node, step, wants=("ram", "scratch"))
    course.skips(0, 10, wants=("ram",))  # only the memory was to have it
    course.deliver(0, Skipped(generation=4, step=99, reason="of a generation before", wants=("scratch",)))
    assert missed(course) == [(step, "scratch", "no buffer was free", step) for step in (1, 2, 4, 8)]


def test_a_step_whose_turn_never_comes_on_a_busy_tier_is_told(course: Course) -> None:
    for step in (6, 8, 10):
        course.all_take(step, wants=("ram", "scratch"))
    assert missed(course) == [(8, "scratch", "a newer one was due before its turn came", 1)]


def test_a_step_that_a_tier_does_without_because_it_does_not_work_is_told_with_that_reason(course: Course) -> None:
    course.all_take(6, wants=("ram", "scratch"))
    course.deliver(0, TierTrouble(generation=5, tier="scratch", detail="No space left on device", errno=28))
    for step in (8, 10):
        course.all_take(step, wants=("ram", "scratch"))
    assert missed(course) == [(8, "scratch", "the tier does not work", 1)]
