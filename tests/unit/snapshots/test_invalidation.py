"""Roll-backs: what is invalid is neither promised nor made durable, however late it comes to light."""

import pytest
from snapshot_course import Course, done, failed, shard

from checkpoint.protocol import Cancel, Discard, Held, SnapshotKey
from resilient.outbox import Outbox
from resilient.protocol.candidates import unpack
from resilient.recovery.rollback import InvalidationRule
from resilient.snapshots import Snapshots, TierPlan


@pytest.fixture
def course() -> Course:
    course = Course()
    course.resumed()
    return course


def discards(course: Course) -> list[tuple[int, int, int]]:
    """Node, step and generation of each request that a quarantine that is done brings about."""
    effects = course.do("quarantine_done")
    return [(node, each.step, each.invalid_generation) for node, each in course.requests(Discard, effects)]


def test_what_is_newer_than_the_step_of_a_roll_back_is_invalid_on_all_tiers(course: Course) -> None:
    course.durable(5)
    course.durable(7)
    course.all_take(8)
    course.core.hold()
    course.do("roll_back", 5, "rolled back to step 5: the loss is not finite")
    assert course.events("checkpoint_rejected") == [
        {"step": 8, "tier": "ram", "reason": "rolled back to step 5: the loss is not finite"}
    ]
    assert (course.core.durable_step, course.core.checkpoints, course.core.newest) == (5, [5], None)
    assert course.core.invalidated_due() == (InvalidationRule(5, 5),)
    course.stopped({node: [shard(8, node)] for node in (0, 1)})
    assert discards(course) == [(0, 5, 5), (1, 5, 5)]
    assert course.core.invalidated_due() == () and discards(course) == []
    course.begin(6)
    assert course.core.candidates() == b""


def test_begin_discards_nothing_by_itself(course: Course) -> None:
    course.do("roll_back", 5, "bad numbers")
    assert not course.requests(Discard, course.begin(6))
    assert course.core.invalidated_due() == (InvalidationRule(5, 5),)


def test_what_is_invalidated_while_a_quarantine_is_under_way_is_still_due(course: Course) -> None:
    course.do("roll_back", 5, "bad numbers")
    course.core.invalidated_due()
    course.do("roll_back", 3, "bad numbers")
    assert discards(course) == [(0, 5, 5), (1, 5, 5)]
    assert course.core.invalidated_due() == (InvalidationRule(5, 3),)
    assert discards(course) == [(0, 3, 5), (1, 3, 5)]
    assert course.core.invalidated_due() == ()


def test_a_commit_that_was_under_way_while_the_run_was_rolled_back_does_not_count(course: Course) -> None:
    course.durable(5)
    flushes = course.jobs("flush", course.all_take(7, wants=("scratch",)))
    ((node, commit),) = course.jobs("commit", course.all_done(flushes))
    effects = course.do("roll_back", 5, "bad numbers")
    assert [(node, each.job_id) for node, each in course.requests(Cancel, effects)] == [(0, commit.job_id)]
    course.deliver(node, done(commit))
    assert (course.core.durable_step, course.core.checkpoints) == (5, [5])
    assert [event["step"] for event in course.events("committed")] == [5]


def test_a_copy_that_ended_before_it_was_cancelled_does_not_keep_its_tier_busy() -> None:
    course = Course(buffers=3, others=(TierPlan("nvme", 2),))
    course.resumed()
    copies = course.jobs("copy", course.all_take(8, wants=("nvme",)))
    course.do("roll_back", 5, "bad numbers")
    course.deliver(0, done(copies[0][1]))
    course.deliver(1, failed(copies[1][1], "cancelled", cancelled=True))
    assert not course.core._transfers.jobs and course.core.newest is None
    assert [event["tier"] for event in course.events("snapshot")] == ["ram"]


def test_a_daemon_that_comes_back_with_what_is_invalid_brings_nothing_back(course: Course) -> None:
    course.all_take(8)
    course.core.hold()
    course.do("roll_back", 5, "bad numbers")
    course.core.invalidated_due()
    discards(course)
    course.begin(6)
    course.stopped({node: [shard(8, node)] for node in (0, 1)})
    assert course.core.newest is None
    assert course.core.invalidated_due() == (InvalidationRule(5, 5),)  # they are to be told before the next start
    assert discards(course) == [(0, 5, 5), (1, 5, 5)]


def test_news_of_what_is_invalid_are_not_believed_however_late_they_come(course: Course) -> None:
    course.durable(5)
    course.do("roll_back", 5, "bad numbers")
    course.begin(6)
    course.resumed(5)
    for node in (0, 1):
        course.deliver(node, Held(generation=5, shard=shard(9, node), wants=("scratch",)))
    assert course.core.checkpoints == [5]
    assert not [each for _, each in course.jobs("flush") if each.key.step == 9]


def test_the_same_steps_can_be_taken_again_after_a_roll_back(course: Course) -> None:
    course.durable(7)
    course.do("roll_back", 5, "bad numbers")
    course.begin(6)
    course.resumed(5)
    course.durable(7)
    assert (course.core.durable_step, course.core.newest) == (7, SnapshotKey(7, 6))
    assert [each.key for each in unpack(course.core.candidates())] == [SnapshotKey(7, 6)]


def test_what_earlier_jobs_have_invalidated_is_due_at_once_and_told_without_what_it_implies() -> None:
    course = Course(invalidated=(InvalidationRule(2, 9), InvalidationRule(3, 5)))
    assert course.core.invalidated_due() == (InvalidationRule(3, 5),)
    course.stopped({node: [shard(8, node, generation=3)] for node in (0, 1)})
    assert course.core.newest is None
    assert discards(course) == [(0, 5, 3), (1, 5, 3)]


def test_numbers_that_are_given_up_on_do_not_become_durable(course: Course) -> None:
    course.durable(5)
    course.all_take(8)
    course.do("roll_back", 5, "bad numbers")
    assert not course.do("save_newest", course.now) and not course.core.behind


def test_the_run_may_start_over_until_a_checkpoint_was_given_up_for_a_newer_one(course: Course) -> None:
    for step in (1, 2, 3):
        course.durable(step)
        assert course.core.beginning
    course.durable(4)
    assert not course.core.beginning


def test_a_core_that_was_told_nothing_has_nothing() -> None:
    core = Snapshots(Course().core.plan)
    out = Outbox()
    core.save_newest(0.0, out)
    core.lost(0, out)
    assert not out.effects and core.newest is None and not core.behind and not core.given_up() and core.checkpoints == []
