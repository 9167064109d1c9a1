"""Roll-backs, from the fault to the start behind them."""

from dataclasses import replace

import pytest
from control_play import Play, candidates, shard
from rollbacks import BAD, durable, spoilt

from checkpoint.protocol import Discard, Held
from resilient.config.timeouts import FENCE_RAISE_S
from resilient.exits import Exit
from resilient.outbox import Finish, Quarantine, RaiseFence, Send
from resilient.protocol.messages import Start
from resilient.recovery.rollback import InvalidationRule


def test_bad_numbers_roll_back_to_a_checkpoint_from_before_and_all_that_is_newer_is_invalid(play):
    play.resumed(0)
    durable(play, 5)
    durable(play, 7)
    for node in (0, 1):
        play.held(node, 8)
    spoilt(play)
    (fault,) = play.events("fault")
    assert (fault["kind"], fault["step"]) == ("not_finite", 9)
    (action,) = play.events("action")
    assert (action["name"], action["step"], action["skip"]) == ("roll_back", 5, [])
    assert {(each["step"], each["tier"]) for each in play.events("checkpoint_rejected")} == {(8, "ram")}
    assert play.coordinator.snapshots.durable_step == 5
    parts = [shard(8, node) for node in (0, 1)]
    first = play.ready(0, 1, parts[:1])
    effects = [*first, *play.ready(1, 1, parts[1:])]
    fence = effects.index(RaiseFence(6, FENCE_RAISE_S))
    aside = effects.index(Quarantine((InvalidationRule(5, 5),), 6))
    starts = [index for index, effect in enumerate(effects) if isinstance(effect, Send) and isinstance(effect.message, Start)]
    assert fence < aside < min(starts)
    rules = [order for _, order in play.requests(Discard, effects)]
    assert [(each.step, each.invalid_generation) for each in rules] == [(5, 5)] * 2
    for index in starts:
        message = effects[index].message
        assert (message.go_back_to, message.skip, message.durable_step) == (5, (), 5)
        assert candidates(message) == []


def test_bad_numbers_at_the_same_data_go_further_back_and_leave_it_out_until_the_end(play):
    durable(play, 3)
    durable(play, 5)
    for target, skip in ((5, ()), (3, ()), (0, ((6, 9),))):
        effects = [*spoilt(play), *play.again()]
        effects += play.wait(3)
        (start, _) = play.sent(Start, effects)
        assert (start.message.go_back_to, start.message.skip, start.message.durable_step) == (target, skip, target)
        assert len(play.requests(Discard, effects)) == 2
    assert [action["skip"] for action in play.events("action")] == [[], [], [(6, 9)]]
    spoilt(play)
    assert play.finish().code is Exit.GAVE_UP
    assert "rolled back to step 5, step 3, step 0" in play.finish().message


def test_once_a_step_is_finished_a_roll_back_is_not_told_again_but_what_is_left_out_is(play):
    durable(play, 3)
    for _ in range(2):
        spoilt(play)
        play.again()
        play.wait(1)
    play.beat(0, 4)
    play.exit(1, step=4)
    play.again()
    effects = play.wait(2)
    message = play.sent(Start, effects)[0].message
    assert (message.go_back_to, message.skip) == (None, ((6, 9),))
    assert not play.requests(Discard, effects)


def test_a_commit_that_was_under_way_while_the_run_was_rolled_back_does_not_count(play):
    durable(play, 5)
    for node in (0, 1):
        play.held(node, 7, wants=["scratch"])
    order = next(order for _, order in reversed(play.jobs("flush")))
    play.flushed(order)
    spoilt(play)
    play.committed(order)
    assert play.coordinator.snapshots.durable_step == 5
    assert play.coordinator.snapshots.checkpoints == [5]


def test_a_worker_killed_while_it_is_rolled_back_does_not_bring_back_what_is_invalid(play):
    durable(play, 5)
    for node in (0, 1):
        play.held(node, 8)
    spoilt(play)
    play.again()
    play.exit(1, step=-1)
    parts = [shard(8, node) for node in (0, 1)]
    for node in (0, 1):
        play.ready(node, 1, parts[node : node + 1])
    (start, _) = play.sent(Start, play.wait(1))
    assert candidates(start.message) == []
    assert start.message.go_back_to == 5


def test_numbers_that_are_given_up_on_do_not_become_durable():
    play = Play(max_roll_backs=0)
    play.start()
    durable(play, 5)
    for node in (0, 1):
        play.held(node, 8)
    spoilt(play)
    parts = [shard(8, node) for node in (0, 1)]
    for node in (0, 1):
        play.ready(node, 1, parts[node : node + 1])
    assert [order.key.step for _, order in play.jobs("flush")] == [5, 5]
    (end,) = [effect for effect in play.effects if isinstance(effect, Finish)]
    assert end.code is Exit.GAVE_UP
    assert end.message.startswith("BadBatch: 4 batches in a row are bad")


def test_news_of_what_is_invalid_is_not_heard_however_late_it_comes(play):
    durable(play, 5)
    spoilt(play)
    play.again()
    for node in (0, 1):
        play.news(node, Held(generation=5, shard=shard(9, node), wants=("scratch",)))
    assert play.coordinator.snapshots.checkpoints == [5]
    assert not [order for _, order in play.jobs("flush") if order.key.step == 9]


@pytest.mark.parametrize("kept", ["durable", "held"])
def test_while_a_job_stops_what_is_newer_than_bad_numbers_does_not_become_durable_and_what_is_older_does(play, kept):
    play.resumed(0)
    held = (5, 8) if kept == "durable" else (5,)
    if kept == "durable":
        durable(play, 5)
        play.effects.clear()
    for step in held:
        for node in (0, 1):
            play.held(node, step)
    play.do("stop", "SIGTERM")
    spoilt(play)
    play.again(shards={node: [shard(step, node) for step in held] for node in (0, 1)})
    assert [order.key.step for _, order in play.jobs("flush")] == ([] if kept == "durable" else [5, 5])
    (action,) = play.events("action")
    assert (action["name"], action["step"], action["skip"]) == ("finish_drain", 5, [])
    assert "bad since step 6: back to step 5" in action["reason"]
    if kept == "held":
        request = play.jobs("flush")[0][1]
        play.flushed(request)
        play.committed(request)
    assert play.finish().code is Exit.STOPPED and play.coordinator.snapshots.durable_step == 5


def test_while_a_job_stops_nothing_of_bad_numbers_becomes_durable_where_nothing_from_before_is_left(play):
    for step in (2, 3, 4, 5):  # more than are kept: the start of the run is no way back any more
        durable(play, step)
    play.effects.clear()
    for node in (0, 1):
        play.held(node, 8)
    play.do("stop", "SIGTERM")
    play.beat(0, 8)
    play.exit(0, 1, replace(BAD, since=1), step=8)
    play.again(shards={node: [shard(8, node)] for node in (0, 1)})
    assert not play.jobs("flush") and play.coordinator.finished
    (action,) = play.events("action")
    assert action["name"] == "finish_drain" and "step" not in action
