"""What is complete in memory goes on to slower tiers, whatever happens meanwhile; and what the end of a run asks."""

from collections.abc import Sequence

import pytest
from snapshot_course import Course, done, failed, promised, shard

from checkpoint.protocol import Cancel, NodeShard, Retain, SnapshotKey, StartJob, TierTrouble, TierWell
from resilient.outbox import Effect
from resilient.snapshots import TierPlan


@pytest.fixture
def course() -> Course:
    course = Course()
    course.resumed()
    return course


def test_a_step_is_durable_when_all_have_flushed_and_one_has_committed(course: Course) -> None:
    flushes = course.jobs("flush", course.all_take(5, wants=("scratch",)))
    assert [(node, each.shard) for node, each in flushes] == [(0, 0), (1, 1)]
    assert not course.jobs("commit", course.all_done(flushes[:1]))
    ((node, commit),) = course.jobs("commit", course.all_done(flushes[1:]))
    assert node == 0 and not course.events("committed") and course.core.durable_step == 0
    course.now += 4
    course.deliver(0, done(commit))
    assert course.events("committed") == [{"step": 5, "tier": "scratch", "bytes": 200, "files": 81}]
    assert course.events("snapshot")[-1] == {"step": 5, "tier": "scratch", "bytes": 200, "stall_s": 0.01, "write_s": 4.0}
    assert (course.core.durable_step, course.core.rate_bytes_per_s) == (5, 50.0)
    assert course.core.checkpoints == [5]


def test_while_a_step_is_flushed_only_the_newest_one_after_it_waits(course: Course) -> None:
    flushes = course.jobs("flush", [effect for step in (5, 6, 7) for effect in course.all_take(step, wants=("scratch",))])
    assert {each.key.step for _, each in flushes} == {5}
    effects = course.all_done(course.jobs("commit", course.all_done(flushes)))
    assert {each.key.step for _, each in course.jobs("flush", effects)} == {7}


def test_a_flush_goes_on_in_the_next_generation_on_its_behalf(course: Course) -> None:
    flushes = course.jobs("flush", course.all_take(9, wants=("scratch",)))
    course.core.hold()
    course.stopped({node: [shard(9, node)] for node in (0, 1)})
    effects = course.begin(6)
    assert {(node, each.job_id) for node, each in course.requests(Cancel, effects)} == {(n, flushes[0][1].job_id) for n in (0, 1)}
    after = course.jobs("flush", course.resumed(9))
    assert {(each.key, each.generation) for _, each in after} == {(SnapshotKey(9, 5), 6)}
    assert not course.jobs("commit", course.all_done(flushes))  # news of the attempt before mean nothing
    assert course.jobs("commit", course.all_done(after))


def test_a_daemon_that_is_new_is_told_again_what_it_has_to_do(course: Course) -> None:
    before = course.jobs("flush", course.all_take(9, wants=("scratch",)))
    effects = course.new_daemon(1, shard(9, 1))
    assert course.jobs("flush", effects) == before[1:]


def test_a_daemon_that_is_new_does_not_begin_again_with_what_was_cancelled(course: Course) -> None:
    flushes = course.jobs("flush", course.all_take(9, wants=("scratch",)))
    course.deliver(0, failed(flushes[0][1]))
    effects = course.new_daemon(1, shard(9, 1))
    assert {each.job_id for _, each in course.jobs("flush", effects)} == {flushes[0][1].job_id + 1}  # the next attempt, of both


def test_a_shard_on_its_way_to_a_disk_is_not_forgotten_meanwhile() -> None:
    course = Course(1, buffers=3, others=(TierPlan("nvme", 2),))
    effects = [*course.taken(0, 6, wants=("nvme",)), *course.resumed()]
    assert [each.key.step for _, each in course.jobs("copy", effects)] == [6]
    assert all(each.upto < 6 for _, each in course.requests(Retain, effects) if each.tier == "nvme")
    assert any(each.upto == 6 for _, each in course.requests(Retain, effects) if each.tier == "ram")
    held = course.taken(0, 7)
    assert [each.steps for _, each in course.requests(Retain, held)] == [(6, 7)]


def test_what_was_copied_of_an_earlier_generation_is_retained_until_all_have_copied_it() -> None:
    course = Course(2, buffers=3, others=(TierPlan("nvme", 2),))
    course.stopped({node: [shard(9, node)] for node in (0, 1)})
    course.begin(6)
    course.core._transfers.pending["nvme"] = SnapshotKey(9, 5)
    copies = course.jobs("copy", course.resumed(9))
    course.deliver(0, done(copies[0][1]))
    effects = course.new_daemon(0, shard(9, 0), shard(9, 0, tier="nvme"))
    assert (9,) in [each.steps for _, each in course.requests(Retain, effects) if each.tier == "nvme"]
    course.deliver(1, done(copies[1][1]))
    assert [(each["step"], each["tier"]) for each in course.events("snapshot")] == [(9, "nvme")]


def of_two_generations(course: Course) -> dict[int, list[NodeShard]]:
    """What nodes hold of a step: in memory what the present generation took, and on a disk what one before it did."""
    return {node: [shard(9, node), shard(9, node, generation=4, tier="nvme")] for node in course.members}


def test_what_a_copy_takes_the_place_of_is_not_promised_any_more() -> None:
    course = Course(2, buffers=3, others=(TierPlan("nvme", 2),))
    course.resumed()
    for step in (8, 9):  # the second waits for the first
        course.all_take(step, wants=("nvme",))
    course.core.hold()
    course.stopped(of_two_generations(course))
    course.begin(6)
    assert promised(course) == [SnapshotKey(9, 5), SnapshotKey(9, 4)]
    copies = course.jobs("copy", course.resumed(9))
    assert [each.key for _, each in copies] == [SnapshotKey(9, 5)] * 2
    assert promised(course) == [SnapshotKey(9, 5)]
    for node, shards in of_two_generations(course).items():  # each is told again to write the copy
        course.new_daemon(node, *shards)
    assert promised(course) == [SnapshotKey(9, 5)]
    course.all_done(copies)
    assert [(each["step"], each["tier"]) for each in course.events("snapshot")][-1] == (9, "nvme")


def test_what_a_copy_under_way_takes_the_place_of_is_not_gone_on_from() -> None:
    """It may end after a node has said what it holds, and before it is called off."""
    course = Course(2, buffers=3, others=(TierPlan("nvme", 2),))
    course.resumed()
    course.all_take(9, wants=("nvme",))
    course.core.hold()
    course.stopped(of_two_generations(course))
    course.begin(6)
    assert promised(course) == [SnapshotKey(9, 5)]


def test_a_copy_of_which_a_node_is_gone_is_not_complete() -> None:
    course = Course(2, spares=1, buffers=3, others=(TierPlan("nvme", 2),))
    course.resumed()
    copies = course.jobs("copy", course.all_take(6, wants=("nvme",)))
    course.deliver(0, done(copies[0][1]))
    course.core.hold()
    course.do("lost", 0)
    course.deliver(1, done(copies[1][1]))
    assert [each["tier"] for each in course.events("snapshot")] == ["ram"]


def test_a_commit_does_not_wait_for_a_node_that_is_gone(course: Course) -> None:
    flushes = course.jobs("flush", course.all_take(9, wants=("scratch",)))
    course.deliver(0, done(flushes[0][1]))
    course.core.hold()
    course.do("lost", 0)
    assert not course.jobs("commit", course.deliver(1, done(flushes[1][1])))
    course.stopped({0: [shard(9, 0)]})
    assert [(node, each.key.step) for node, each in course.jobs("flush", course.do("save_newest", course.now))] == [(0, 9), (1, 9)]


def test_what_is_held_by_a_replica_is_flushed_from_there() -> None:
    course = Course(spares=1)
    course.resumed()
    course.all_take(9, wants=("scratch",))
    course.core.hold()
    course.do("lost", 1)
    course.stopped({0: [shard(9, 0), shard(9, 1, replica=True)]})
    course.begin(6, [0, 2])
    flushes = course.jobs("flush", course.resumed(9))
    assert [(node, each.shard) for node, each in flushes] == [(0, 0), (0, 1)]
    assert course.jobs("commit", course.all_done(flushes))


def test_the_loss_of_a_node_cancels_what_others_do_for_the_same_step(course: Course) -> None:
    flushes = course.jobs("flush", course.all_take(9, wants=("scratch",)))
    course.core.hold()
    effects = course.do("lost", 1)
    assert [(node, each.job_id) for node, each in course.requests(Cancel, effects)] == [(0, flushes[0][1].job_id)]
    course.stopped({1: [shard(9, 1)]})
    effects = course.deliver(0, failed(flushes[0][1], "cancelled", cancelled=True))
    assert [node for node, _ in course.jobs("flush", effects)] == [0, 1]  # from the start
    assert not course.events("fault")


def test_a_step_that_fails_three_times_is_given_up_with_a_fault(course: Course) -> None:
    effects = course.all_take(9, wants=("scratch",))
    for _ in range(3):
        assert not course.events("fault") and not course.core.given_up()
        flushes = course.jobs("flush", effects)
        effects = course.deliver(1, failed(flushes[1][1], "shard 1 is damaged"))
        assert [node for node, _ in course.requests(Cancel, effects)] == [0]
        effects = course.deliver(0, failed(flushes[0][1], "cancelled", cancelled=True))
    (fault,) = course.events("fault")
    assert (fault["kind"], fault["step"], fault["detail"]) == ("storage", 9, "tier scratch: step 9 is given up: shard 1 is damaged")
    assert not course.jobs("flush", effects) and course.core.given_up() and course.core.behind


def test_a_flush_of_what_a_node_holds_no_more_is_not_tried_again(course: Course) -> None:
    course.all_take(8)
    ((_, flush), _) = course.jobs("flush", course.all_take(9, wants=("scratch",)))
    lost = failed(flush, "its buffer is leased", superseded=True)
    effects = course.deliver(0, lost) + course.deliver(1, failed(course.jobs("flush")[1][1], "cancelled", cancelled=True))
    assert not course.jobs("flush", effects) and course.core.newest is None  # 8 was not needed any more
    assert not course.jobs("flush", course.do("save_newest", course.now))
    course.all_take(10)
    assert course.core.newest == SnapshotKey(10, 5)
    course.deliver(0, lost)  # once more, of a job that is over
    assert course.core.newest == SnapshotKey(10, 5)


def test_what_does_not_get_on_is_superseded_by_what_is_newer(course: Course) -> None:
    flushes = course.jobs("flush", course.all_take(5, wants=("scratch",)))
    course.deliver(0, TierTrouble(generation=5, tier="scratch", detail="no space left on device", errno=28))
    assert len(course.requests(Cancel, course.all_take(6, wants=("scratch",)))) == 2
    effects = [course.deliver(node, failed(each, "cancelled", cancelled=True)) for node, each in flushes][-1]
    assert {each.key.step for _, each in course.jobs("flush", effects)} == {6}


def test_what_gets_on_again_after_a_trouble_is_not_called_off(course: Course) -> None:
    course.all_take(5, wants=("scratch",))
    course.deliver(0, TierTrouble(generation=5, tier="scratch", detail="no space left on device", errno=28))
    course.deliver(0, TierWell(generation=5, tier="scratch", down_s=1.0))
    assert not course.requests(Cancel, course.all_take(6, wants=("scratch",)))


def called_off(course: Course, *, how: str) -> StartJob:
    """A commit that its daemon is told to call off, and that is not over."""
    ((_, commit),) = course.jobs("commit", course.all_done(course.jobs("flush", course.all_take(5, wants=("scratch",)))))
    course.deliver(0, TierTrouble(generation=5, tier="scratch", detail="nothing has been written for 30 s"))
    effects = course.all_take(6, wants=("scratch",)) if how == "superseded" else course.do("roll_back", 4, "bad numbers")
    assert [node for node, _ in course.requests(Cancel, effects)] == [0]
    return commit


def test_a_commit_that_was_superseded_and_made_all_the_same_is_told_and_counts(course: Course) -> None:
    commit = called_off(course, how="superseded")
    effects = course.deliver(0, done(commit))
    assert [each["step"] for each in course.events("committed")] == [5]
    assert course.core.durable_step == 5 and 5 in course.core.checkpoints
    assert {each.key.step for _, each in course.jobs("flush", effects)} == {6}


def test_a_commit_of_what_was_rolled_back_meanwhile_does_not_count(course: Course) -> None:
    course.deliver(0, done(called_off(course, how="rolled back")))
    assert not course.events("committed") and course.core.durable_step == 0 and course.core.checkpoints == []


def test_a_stop_makes_durable_what_is_newer_than_where_it_went_on_and_not_than_a_damaged_checkpoint() -> None:
    course = Course(1, buffers=3, durable_step=30, durable_steps=(20, 30))
    course.resumed(20)  # for the newest one was found damaged
    course.taken(0, 25)
    assert course.core.behind
    effects = course.do("save_newest", course.now)
    assert [(each.kind, each.key.step) for _, each in course.jobs("flush", effects)] == [("flush", 25)]
    assert not course.do("save_newest", course.now)  # it is under way
    assert course.core.superseded(ended=False) == []
    assert course.core.checkpoints == [20, 25]


def test_at_the_end_of_a_campaign_nothing_but_the_durable_tier_is_needed() -> None:
    course = Course(others=(TierPlan("nvme", 2),))
    course.resumed()
    course.durable(5)
    assert course.core.superseded(ended=False) == ["ram"]
    assert course.core.superseded(ended=True) == ["ram", "nvme"]
    assert not course.do("save_newest", course.now) and not course.core.given_up()


def test_a_tier_that_cannot_be_written_is_a_fault_that_is_over_when_it_can(course: Course) -> None:
    trouble = TierTrouble(generation=5, tier="scratch", detail="no space left on device", errno=28)
    course.deliver(0, trouble)
    assert not course.deliver(0, trouble)
    (fault,) = course.events("fault")
    assert fault == {
        **{"fault_id": "s1", "incident_id": "s1", "kind": "storage", "ranks": [], "nodes": [0], "step": None, "detect_s": 0.0},
        **{"detail": "tier scratch: no space left on device", "evidence": "errno 28"},
    }
    reason = "scratch is tried again; training goes on"
    assert course.events("action") == [{"fault_id": "s1", "incident_id": "s1", "name": "degrade_tier", "reason": reason}]
    assert course.core.troubled
    course.deliver(0, TierWell(generation=5, tier="scratch", down_s=3.0))
    assert course.events("recovered") == [{"fault_id": "s1", "incident_id": "s1", "step": 0, "downtime_s": 0.0, "lost_steps": 0}]
    assert not course.core.troubled and not course.deliver(0, TierWell(generation=5, tier="scratch", down_s=3.0))


@pytest.mark.parametrize("how", ["lost", "new daemon"])
def test_the_trouble_of_a_daemon_that_is_gone_is_over(course: Course, how: str) -> None:
    course.deliver(0, TierTrouble(generation=5, tier="scratch", detail="it hangs"))
    course.do("lost", 0) if how == "lost" else course.new_daemon(0)
    assert len(course.events("recovered")) == 1 and not course.core.troubled


def test_a_tier_that_no_node_can_write_is_a_fault_of_eight_nodes_and_one_of_the_others() -> None:
    course = Course(300)
    for node in range(300):
        course.deliver(node, TierTrouble(generation=5, tier="scratch", detail="it is full"))
    assert [fault["nodes"] for fault in course.events("fault")] == [[node] for node in range(9)]
    assert course.events("fault")[-1]["detail"] == "tier scratch: it is full (and on more nodes)"
    for node in range(299):
        course.deliver(node, TierWell(generation=5, tier="scratch", down_s=1.0))
    assert len(course.events("recovered")) == 8 and course.core.troubled
    course.deliver(299, TierWell(generation=5, tier="scratch", down_s=1.0))
    assert {each["fault_id"] for each in course.events("recovered")} == {f"s{number}" for number in range(1, 10)}
    assert not course.core.troubled


def test_a_step_with_the_bytes_of_the_one_before_is_refused(course: Course) -> None:
    course.taken(0, 8)
    effects = course.stale(1, 8)
    assert course.requests(Retain, effects)[0][1].left_out == (8,)
    (fault,) = course.events("fault")
    assert (fault["kind"], fault["nodes"], fault["step"]) == ("storage", [1], 8)
    assert fault["detail"] == "tier ram: step 8 carries the same bytes as step 7 although training went on: refused"


def test_a_step_that_all_nodes_refuse_names_eight_of_them_and_counts_the_others() -> None:
    course = Course(300)
    course.resumed()
    for node in range(300):
        course.stale(node, 8)
    assert [fault["nodes"] for fault in course.events("fault")] == [[node] for node in range(8)]
    course.all_take(9)
    last = course.events("fault")[-1]
    assert last["nodes"] == list(range(8, 16)) and last["detail"].endswith("on 292 more nodes: 8, 9, 10, 11, 12, 13, 14, 15, ...")
    assert len(course.events("fault")) == 9


def test_what_is_copied_again_after_a_restart_is_not_forgotten_on_the_slower_tier_at_the_same_time() -> None:
    course = Course(others=(TierPlan("nvme", 1),))
    course.resumed()
    course.all_take(8, wants=("nvme",))
    course.stopped({node: [shard(8, node)] for node in (0, 1)})
    course.begin(6)
    effects = course.resumed(8)
    assert [request.key.step for _, request in course.jobs("copy", effects)] == [8, 8]
    assert {each.steps for _, each in course.requests(Retain, effects) if each.tier == "nvme"} == {(8,)}


def test_what_sound_nodes_have_copied_of_steps_that_a_broken_node_cannot_have_is_forgotten() -> None:
    """Else one node's broken tier fills those of all others."""
    course = Course(2, buffers=3, others=(TierPlan("nvme", 1),))
    course.resumed()
    lying: set[int] = set()

    def heard(effects: Sequence[Effect]) -> Sequence[Effect]:
        for node, each in course.requests(Retain, effects):
            if node == 0 and each.tier == "nvme":
                lying.difference_update([step for step in lying if step not in each.steps and step <= each.upto])
        return effects

    for step in range(6, 20):
        copies = course.jobs("copy", heard(course.all_take(step, wants=("nvme",))))
        while copies:
            ((_, sound), (_, broken)) = copies
            lying.add(step)
            effects = [*heard(course.deliver(0, done(sound))), *heard(course.deliver(1, failed(broken)))]
            copies = course.jobs("copy", effects)
        assert len(lying) <= 2, f"{lying} lie on the tier of node 0, and no step of them is whole there"
