"""Between the last `Ready` and the first `Start`: the fence, and what is quarantined behind it."""

from control_play import Play, shard
from rollbacks import durable, spoilt

from checkpoint.protocol import Discard
from resilient.config.timeouts import ANSWER_S, FENCE_HANG_S, FENCE_RAISE_S, QUARANTINE_S
from resilient.control.coordinator import State
from resilient.exits import Exit
from resilient.outbox import Quarantine, RaiseFence
from resilient.protocol.messages import Start, Stop


def gathered(nodes: int = 2, **settings: int) -> Play:
    """All nodes are ready, and nobody has answered the fence."""
    play = Play(nodes, **settings)
    play.fence = None
    play.start()
    return play


def test_nobody_starts_before_the_fence_is_up():
    play = gathered()
    assert play.coordinator.state is State.FENCING and play.effects[-1] == RaiseFence(5, FENCE_RAISE_S)
    assert play.generation == 4 and not play.sent(Start, play.wait(5))
    starts = play.sent(Start, play.do("fence_raised", 5, None))
    assert [send.node for send in starts] == [0, 1] and play.generation == 5
    assert not play.do("fence_raised", 5, None)


def test_a_fence_that_cannot_be_raised_ends_the_job_where_nothing_is_held():
    play = gathered()
    play.do("fence_raised", 5, "no space left on device")
    assert play.finish().code is Exit.UNUSABLE
    assert play.finish().message == "the checkpoint fence: no space left on device"


def test_where_nodes_hold_a_snapshot_the_job_goes_on_without_the_fence(play):
    play.held(0, 8), play.held(1, 8)
    play.exit(1)
    play.fence = None
    play.again(shards={node: [shard(8, node)] for node in (0, 1)})
    assert play.effects[-1] == RaiseFence(6, FENCE_HANG_S)
    assert len(play.sent(Start, play.do("fence_raised", 6, "no space left on device"))) == 2


def test_a_node_that_is_lost_meanwhile_is_gathered_again_and_the_late_answer_means_nothing():
    play = gathered()
    effects = play.do("lost", 1, "gone")
    assert play.coordinator.state is State.GATHERING and not play.sent(Stop, effects)
    assert not play.do("fence_raised", 5, None)
    effects = play.join(1)
    assert [each.generation for each in effects if isinstance(each, RaiseFence)] == [6]
    assert not play.do("fence_raised", 5, "an error of the one before")
    assert {send.message.generation for send in play.sent(Start, play.do("fence_raised", 6, None))} == {6}


def test_a_spare_that_is_lost_meanwhile_holds_nobody_up():
    play = gathered(2, spares=1)
    play.do("lost", 2, "gone")
    assert [send.node for send in play.sent(Start, play.do("fence_raised", 5, None))] == [0, 1]


def test_a_stop_meanwhile_ends_the_job_and_nobody_starts():
    play = gathered()
    play.do("stop", "SIGTERM")
    assert play.finish().code is Exit.STOPPED
    assert not play.do("fence_raised", 5, None)


def rolled_back(play: Play) -> None:
    """The fence of the generation behind a roll-back is up."""
    durable(play, 5), durable(play, 7)
    spoilt(play)
    play.fence = None
    play.again()
    play.do("fence_raised", 6, None)


def test_what_is_invalid_is_quarantined_behind_the_fence_and_before_the_start(play):
    rolled_back(play)
    assert isinstance(play.effects[-1], Quarantine) and play.coordinator.state is State.FENCING
    effects = play.do("quarantined", 6, [(7, "rolled-back-7")], None)
    assert play.events("checkpoint_rejected")[-1] == {
        "step": 7,
        "tier": "scratch",
        "reason": "rolled back: it is rolled-back-7 now",
    }
    assert len(play.requests(Discard, effects)) == 2 and len(play.sent(Start, effects)) == 2


def test_what_cannot_be_quarantined_ends_the_job(play):
    rolled_back(play)
    play.do("quarantined", 6, [], "permission denied")
    assert play.finish().code is Exit.UNUSABLE
    assert play.finish().message == "a checkpoint that was rolled back cannot be set aside on tier scratch: permission denied"


def test_a_node_that_is_lost_while_it_is_quarantined_does_not_see_a_start_without_it(play):
    rolled_back(play)
    play.do("lost", 1, "gone")
    play.join(1)
    assert not play.sent(Start, play.do("quarantined", 6, [(7, "rolled-back-7")], None))
    play.wait(1)
    effects = play.do("fence_raised", 7, None)
    assert isinstance(effects[-1], Quarantine)  # once more: nobody knows how far it had come
    assert len(play.sent(Start, play.do("quarantined", 7, [], None))) == 2


def test_a_fence_that_nobody_answers_ends_the_job_where_nothing_is_held():
    play = gathered()
    play.wait(FENCE_RAISE_S + ANSWER_S - 1)
    assert play.coordinator.state is State.FENCING
    play.wait(1)
    assert play.finish().code is Exit.UNUSABLE
    assert play.finish().message == "the checkpoint fence: nothing is heard of it"
    assert not play.do("fence_raised", 5, None)


def held_and_killed(play: Play) -> None:
    """Nodes hold a snapshot, and nobody answers the fence of the next generation."""
    play.held(0, 8), play.held(1, 8)
    play.exit(1)
    play.fence = None
    play.again(shards={node: [shard(8, node)] for node in (0, 1)})


def test_where_nodes_hold_a_snapshot_a_fence_that_nobody_answers_holds_nobody_up(play):
    held_and_killed(play)
    assert not play.sent(Start, play.wait(FENCE_HANG_S + ANSWER_S - 1))
    assert len(play.sent(Start, play.wait(1))) == 2
    assert not play.do("fence_raised", 6, None) and not play.do("fence_raised", 6, "it took too long")


def test_time_for_which_the_driver_was_away_is_not_counted_against_the_fence():
    play = gathered()
    play.now += 500
    play.do("tick")
    assert play.coordinator.state is State.FENCING
    assert len(play.sent(Start, play.do("fence_raised", 5, None))) == 2


def test_a_quarantine_that_nobody_answers_ends_the_job(play):
    rolled_back(play)
    play.wait(QUARANTINE_S + ANSWER_S - 1)
    assert play.coordinator.state is State.FENCING
    play.wait(1)
    message = "a checkpoint that was rolled back cannot be set aside on tier scratch: nothing is heard of it"
    assert play.finish().code is Exit.UNUSABLE and play.finish().message == message


def test_the_late_answer_of_a_fence_does_not_start_anybody_before_the_quarantine(play):
    rolled_back(play)
    assert not play.do("fence_raised", 6, None)
    assert len(play.sent(Start, play.do("quarantined", 6, [], None))) == 2
